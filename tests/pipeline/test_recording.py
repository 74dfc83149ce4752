from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from spatialdl.models import resnet18, unet
from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.steps import IMAGE, Recording, output_of, run_step
from spatialdl.spatial.source_lines import users_line, users_line_of
from tests.pipeline.cutting import run_stages, stages_of, trained


class Runs(nn.Module):
    """Its forward is a function."""

    def __init__(self, function, **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor):
        return self.function(self, x)


def recorded(model: nn.Module, samples: int = 2, training: bool = True, size=(3, 9, 7)):
    return Forward(model, size).of(samples, training)


def replayed(model: nn.Module, recording: Recording, x: Tensor):
    values = {IMAGE: x}
    for step in recording.steps:
        run_step(step, model, values, x.device)
    return output_of(recording, values)


def names(recording: Recording) -> list[str]:
    return [step.name for step in recording.steps]


def test_an_unusual_forward_runs_again_as_it_was():
    """Loops, branches on sizes, tuples, writes in place and into views, new tensors."""

    def forward(self, x):
        parts = []
        for part in x.chunk(3, dim=1):
            y = self.conv(part)
            if y.shape[-1] % 2:
                y = F.pad(y, (0, 1))
            parts.append(y)
        parts[0] += 1  # the same tensor in the list
        first, *rest = parts
        first[:, :, 0].mul_(2)
        stacked = torch.stack([first, *rest]) + torch.arange(
            first.shape[-1], dtype=x.dtype, device=x.device
        )
        with torch.no_grad():
            scale = stacked.mean() + self.norm.weight.sum()
        return {"out": (stacked * scale).view(3, x.size(0), -1).sum(0), "parts": (rest[0], None)}

    model = Runs(forward, conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(5)).double()
    for samples in (2, 3):
        x = torch.randn(samples, 3, 9, 7, dtype=torch.float64)
        expected = model(x)
        found = replayed(model, recorded(model, samples), x)
        assert torch.equal(found["out"], expected["out"])
        assert torch.equal(found["parts"][0], expected["parts"][0])
        assert found["parts"][1] is None


def test_gradients_are_those_of_the_network():
    def forward(self, x):
        with torch.no_grad():
            y = self.one(x)
        return self.two(y * self.one.weight.sum()).flatten(1).sum(1)

    model = Runs(forward, one=nn.Conv2d(3, 3, 1), two=nn.Conv2d(3, 2, 3)).double()
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    grads = []
    for run in (model, lambda x: replayed(model, recorded(model), x)):
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 3  # the bias of the first has none
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_blocks_and_what_torch_has_stay_whole_and_the_rest_is_opened():
    network = Runs(
        lambda self, x: self.head(self.inner(self.body(x))),
        body=nn.Sequential(nn.Conv2d(3, 3, 1), Runs(lambda self, x: x.relu() + 1)),
        inner=Runs(lambda self, x: self.conv(x).sigmoid(), conv=nn.Conv2d(3, 3, 1)),
        head=nn.Flatten(),
    )
    recording = recorded(network)
    assert names(recording) == ["body.0", "body.1", "inner.conv", "sigmoid", "head"]
    assert [step.path for step in recording.steps][2:4] == ["inner.conv", "inner"]


def test_what_has_a_hook_stays_whole():
    hooked = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert names(recorded(nn.Sequential(hooked, nn.ReLU()))) == ["0", "1"]


class Twice(torch.autograd.Function):
    """Its gradient is not that of what it does."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


def test_a_module_that_calls_an_autograd_function_stays_whole():
    """What it calls inside once was taken for steps of the network, without a gradient."""
    part = Runs(lambda self, x: Twice.apply(self.conv(x)), conv=nn.Conv2d(3, 1, 1))
    part.requires_grad_(False)  # for now
    model = Runs(lambda self, x: self.part(x).tanh(), part=part)
    recording = recorded(model)
    assert names(recording) == ["part", "tanh"]
    part.requires_grad_()
    x = torch.randn(2, 3, 9, 7)
    gradients = []
    for run in (model, lambda x: replayed(model, recording, x)):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append(part.conv.weight.grad.clone())
    assert torch.equal(*gradients)
    with pytest.raises(CannotRecord, match=r"calls a torch\.autograd\.Function.* separate module"):
        recorded(part)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_cannot_be_written_down_stays_whole(reentrant):
    inner = Runs(lambda self, x: x.relu(), layer=nn.Conv2d(3, 3, 1))
    part = Runs(lambda self, x: checkpoint(self.inner, x, use_reentrant=reentrant), inner=inner)
    part = nn.Sequential(nn.Conv2d(3, 3, 1), part)
    assert names(recorded(Runs(lambda self, x: self.part(x).tanh(), part=part))) == [
        *("part.0", "part.1", "tanh")
    ]
    with pytest.raises(CannotRecord, match=r"calls a (part under hooks|torch\.autograd)"):
        recorded(Runs(lambda self, x: part[1].function(part[1], self.part[0](x)), part=part))


def in_bfloat16(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.mT


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, "meta"),
        (lambda self, x: 3, "returns no tensor"),
        (lambda self, x: x + self.constant, "an attribute that is not a buffer"),
        (in_bfloat16, "autocast"),
    ],
)
def test_what_depends_on_numbers_cannot_be_recorded(forward, reason):
    model = Runs(forward)
    model.constant = torch.ones(1)
    with pytest.raises(CannotRecord, match=reason):
        recorded(model)


def test_another_way_for_other_samples_or_in_evaluation_is_refused():
    network = Forward(Runs(lambda self, x: x.relu() if len(x) > 2 else x.tanh()), (3, 4, 4))
    network.of(2, True)
    with pytest.raises(CannotRecord, match=r"for 3 samples in training.*'relu' instead of 'tanh'"):
        network.of(3, True)
    network = Forward(Runs(lambda self, x: x.relu() if self.training else x.tanh()), (3, 4, 4))
    network.of(2, True)
    with pytest.raises(CannotRecord, match=r"in evaluation its forward takes another"):
        network.of(2, False)


def test_recording_leaves_the_network_and_modules_in_general_as_they_are():
    model, call = resnet18(num_classes=4, width=4).double(), nn.Module.__call__
    before = {key: value.clone() for key, value in model.state_dict().items()}
    recorded(model, size=(3, 32, 32))
    with pytest.raises(CannotRecord):
        recorded(Runs(lambda self, x: 3))
    assert nn.Module.__call__ is call
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_whose_weights_are_computed_are_cut_like_others(change):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3).double(), nn.ReLU(), nn.Conv2d(4, 4, 3).double()
        change(layers[0])
        change(layers[2])
        return nn.Sequential(*layers)

    model, twin = make(), make()
    stages = stages_of(model, [2])
    found, expected = trained(model, lambda x: run_stages(stages, x)), trained(twin, twin)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_lazy_modules_are_refused_until_they_have_a_shape():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    with pytest.raises(ValueError, match=r"'0\.weight' of a lazy module: run one forward, on an"):
        recorded(model)
    model(torch.zeros(1, 3, 9, 7))
    assert names(recorded(model)) == ["0", "1"]


# --- source lines


def here() -> str:
    return f"{__file__}:{inspect.currentframe().f_back.f_lineno}"


def test_the_innermost_line_that_is_the_users():
    assert users_line() == here()
    found = []
    layer = nn.Identity()
    layer.register_forward_hook(lambda *_: found.append(users_line(inspect.currentframe().f_back)))
    layer(torch.ones(1)), found.append(here())
    assert found[0] == found[1]


def test_an_error_is_the_users_where_the_user_called():
    try:
        torch.ones(2).view(3), here()
    except RuntimeError as error:
        where = users_line_of(error)
    assert where.startswith(f"{__file__}:")
    lines = Path(__file__).read_text().splitlines()
    assert "view(3)" in lines[int(where.rpartition(":")[2]) - 1]


def test_steps_know_where_they_were_called():
    recording = Forward(unet(width=2, depth=1), (3, 32, 32)).of(2, training=True)
    assert len(recording.steps) > 3
    assert all("models/unet.py:" in step.where for step in recording.steps)
