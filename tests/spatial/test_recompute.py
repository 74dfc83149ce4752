"""Blocks that run again in backward, in one process; on split images see tests/mpi."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from spatialdl.models import resnet18, resnet50, resnet110_v2, unet
from spatialdl.spatial.recompute import recompute, recompute_blocks, weight_layers


def count_calls(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


class Layer(nn.Module):
    """A transformer's, without the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.ModuleList(nn.Sequential(Layer(), Layer(), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (resnet18, [f"layer{n}.{i}" for n in range(1, 5) for i in range(2)]),
        (resnet50, [f"layer{n}.{i}" for n, c in enumerate((3, 4, 6, 3), 1) for i in range(c)]),
        (resnet110_v2, [f"layer{n}.{i}" for n in range(1, 4) for i in range(12)]),
        (unet, [f"encoder.{i}" for i in range(5)] + [f"decoder.{i}" for i in range(4)]),
        (Encoder, [f"stages.{n}.{i}" for n in range(2) for i in range(2)]),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1)), []),
    ],
)
def test_blocks_are_what_repeats_in_lists(build, names):
    with torch.device("meta"):
        model = build()
    keys = list(model.state_dict())
    assert weight_layers(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm2d(3), nn.Conv2d(1, 1, 1))) == 2
    assert recompute_blocks(model) == names
    assert list(model.state_dict()) == keys
    kinds = [type(module) for module in model.modules()]
    assert recompute_blocks(model) == names
    assert [type(module) for module in model.modules()] == kinds  # once is enough


def test_a_block_runs_again_in_backward_and_only_then():
    model = Encoder()
    recompute_blocks(model)
    calls = count_calls(model, Layer)
    calls_inside = count_calls(model, nn.Linear)
    model(torch.rand(2, 4)).sum().backward()
    assert len(calls) == 4
    assert calls_inside.count("stages.0.0.up") == 2
    assert calls_inside.count("stem") == 1
    calls_inside.clear()
    with torch.no_grad():
        model(torch.rand(2, 4))
    assert calls_inside.count("stages.0.0.up") == 1


class Block(nn.Module):
    """All that must come out the same: statistics, dropout, power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = spectral_norm(nn.Conv2d(3, 3, 3, padding=1))
        self.bn1 = nn.BatchNorm2d(3)
        self.conv2 = nn.Conv2d(3, 3, 1)
        self.bn2 = nn.BatchNorm2d(3, momentum=None)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.bn1(self.conv1(x)).relu_()
        x = nn.functional.dropout(x, 0.4, self.training)
        return self.bn2(self.conv2(x)) * scale


def train(model: nn.Module, passes: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    image = torch.rand(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        output = model(image)
        for number in range(passes):
            output.square().sum().backward(retain_graph=number < passes - 1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"image": image.grad, **grads, **dict(model.named_buffers())}


def test_a_copy_runs_its_own_block():
    model = nn.Sequential(Block(), Block()).eval()
    recompute_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].bn2.weight.zero_()
        twin[1].bn2.bias.fill_(7)
    x = torch.rand(1, 3, 4, 4)
    assert (twin(x) == 7).all()
    assert (twin[1](x, scale=2.0) == 14).all()  # arguments by name are passed on
    assert not (model(x) == 7).any()
    twin(x).sum().backward()
    assert model[0].conv2.weight.grad is None
    assert isinstance(twin[0], Block)


def test_what_a_block_keeps_is_its_input():
    kept: list[int] = []

    def bytes_kept(model: nn.Module) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.nbytes) or x, lambda x: x
        ):
            model(torch.rand(1, 3, 64, 64, requires_grad=True))
        return sum(kept)

    model = nn.Sequential(Block(), Block())
    everything = bytes_kept(model)
    recompute_blocks(model)
    assert bytes_kept(model) < 0.3 * everything


def test_an_input_that_is_overwritten_is_noticed():
    x = torch.rand(3, requires_grad=True).exp()
    y = recompute(torch.Tensor.sin, x, modules=[nn.Linear(2, 2)])
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Overwrites(nn.Module):
    """Before its activation, which writes into what it is given; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv1, self.conv2 = nn.ReLU(True), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.act(x)
        return x + self.conv2(self.conv1(x).tanh()).tanh() * self.calls


class Pyramid(nn.Module):
    """Uses what its blocks have written into."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Overwrites() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x * 1]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return torch.stack(maps)


@pytest.mark.parametrize(
    ("make", "passes"), [(Pyramid, 1), (Pyramid, 2), (lambda: nn.Sequential(Block(), Block()), 1)]
)
def test_gradients_and_buffers_are_those_of_a_single_run(make, passes):
    """Also of blocks that write into their inputs: they run again from what it was."""
    torch.manual_seed(0)
    plain = make().double()
    again = copy.deepcopy(plain)
    recompute_blocks(again)
    expected, found = train(plain, passes), train(again, passes)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    if make is Pyramid:
        assert [block.calls for block in again.blocks] == [2, 2, 2]


def test_a_block_that_writes_into_its_weights_is_refused():
    class Clamps(Overwrites):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.conv1.weight.clamp_(-1, 1)
            return super().forward(x)

    model = nn.Sequential(Clamps(), Clamps())
    recompute_blocks(model)
    output = model(torch.rand(1, 3, 4, 4, requires_grad=True) * 1)
    with pytest.raises(RuntimeError, match=r"writes to a weight .*Clamps"):
        output.sum().backward()
