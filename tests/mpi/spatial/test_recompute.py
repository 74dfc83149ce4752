"""What autograd keeps of split images, and blocks that run again in backward: without talking."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import Mesh, recompute_blocks, shard
from spatialdl.models import resnet18
from spatialdl.spatial.checking.compare import Numbers, differences, one_step
from tests.mpi.equality import Operation, drawn, kept_for_backward, storage


class Block(nn.Module):
    """What talks: halos, statistics, a pooled gate, and a stride that leaves ranks empty."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, (5, 1), padding=(2, 0))
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu_()
        x = self.bn2(self.conv2(x))
        return x * torch.sigmoid(self.gate(nn.functional.adaptive_avg_pool2d(x, 1)))


class Checkpointed(nn.Module):
    """A network that recomputes by itself, as those of other people do."""

    def __init__(self, blocks: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant, self.checkpoints = blocks, reentrant, True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            again = self.checkpoints
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
        return x


def blocks(*strides: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(stride) for stride in strides)).double()


def train(model: nn.Module, size: tuple[int, int], mesh: Mesh | None) -> Numbers:
    """Of the second of two steps, whose statistics are those of both."""
    image = drawn(2, 2, 4, *size)
    one_step(model, image, (), mesh)
    return one_step(model, image, (), mesh)


@pytest.mark.parametrize(
    ("way", "size", "strides"),
    [
        ("blocks", (13, 11), (1, 2, 1)),
        ("blocks", (6, 5), (2, 2, 1)),
        ("blocks in checkpoints", (9, 16), (1, 1)),
        ("checkpoints", (6, 5), (2, 2, 1)),
        ("reentrant", (6, 5), (2, 2, 1)),
    ],
)
def test_equal_to_one_process(
    size: tuple[int, ...], strides: tuple[int, ...], way: str, meshes: dict
) -> None:
    """A network's own checkpoints update running statistics twice, as they do in one process."""

    def network() -> nn.Module:
        model = blocks(*strides)
        return model if way == "blocks" else Checkpointed(model, way == "reentrant")

    plain = network()
    if way == "blocks in checkpoints":
        plain.checkpoints = False
    expected = train(plain, size, None)
    for mesh in meshes.values():
        model = network()
        if way.startswith("blocks"):
            assert len(recompute_blocks(model)) == len(strides)
        assert differences(train(model, size, mesh), expected) == [], f"{way} on {mesh.grid}"


def test_running_again_says_nothing_to_other_ranks(meshes: dict, monkeypatch) -> None:
    said: Counter[str] = Counter()
    for mesh in [*meshes.values()][:2]:
        kind = type(mesh.grid_comm)
        for name in ("all_gather", "all_reduce", "start_exchange"):
            original = getattr(kind, name)

            def counting(*args, _original=original, _name=name, **kwargs):
                said[_name] += 1
                return _original(*args, **kwargs)

            monkeypatch.setattr(kind, name, counting)
        counts = []
        for again in (False, True):
            torch.manual_seed(0)
            model = resnet18(num_classes=3, width=2).double()
            if again:
                recompute_blocks(model)
            x = shard(torch.rand(1, 3, 38, 34, dtype=torch.float64), mesh)
            loss = model(x).square().sum()
            said.clear()
            loss.backward()
            counts.append(dict(said))
        monkeypatch.undo()
        assert counts[0] == counts[1]
        assert mesh.grid == (1, 1) or counts[0]["all_reduce"] > 0


# --- what autograd keeps: no more than for one process


KEPT: dict[str, tuple[Operation, int]] = {
    "average": (lambda x: F.avg_pool2d(x, 2), 0),
    "average, stride": (lambda x: F.avg_pool2d(x, 3, 2, 1), 0),
    "average of what there is": (lambda x: F.avg_pool2d(x, 5, 1, 2, True, False), 0),
    "adaptive average to one": (lambda x: F.adaptive_avg_pool2d(x, 1), 8),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 3), 8),
    "adaptive average of rows": (lambda x: F.adaptive_avg_pool2d(x, (4, None)), 8),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x, 3), 4 * 3 * 3 * 8),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), 0),
    "fold": (lambda x: F.fold(x.flatten(2), (33, 37), 2), 0),
}
"""And the most bytes that are kept of an image."""


@pytest.mark.parametrize("name", KEPT)
def test_no_pixel_is_kept(name: str, meshes: dict) -> None:
    operation, most = KEPT[name]
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        assert sum(kept_for_backward(operation, x).values()) <= most


def test_max_pooling_keeps_its_places_only(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 32, 36), mesh).requires_grad_()
        places = kept_for_backward(lambda x: F.max_pool2d(x, 3, 2, 1), x)
        outputs = F.max_pool2d(x, 3, 2, 1).to_local()
        border = 4 * 2 * sum(outputs.shape[2:])  # whose windows reach to other tiles: twice
        assert 8 * outputs.numel() <= sum(places.values()) <= 8 * (outputs.numel() + border)


NORMS: list[Operation] = [
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    lambda x, w, b: F.group_norm(x, 2, w, b),
    lambda x, w, b: F.instance_norm(x, None, None, w, b),
]


def test_norms_keep_the_input_and_a_few_statistics(meshes: dict) -> None:
    weight, bias = (torch.rand(4).double().requires_grad_() for _ in range(2))
    for mesh in meshes.values():
        x = shard(torch.rand(2, 4, 32, 32).double(), mesh).requires_grad_()
        for norm in NORMS:
            kept = kept_for_backward(norm, x, weight, bias)
            assert sum(kept.values()) < x.to_local().nbytes + 64 * 8


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_transposed_convolutions_keep_the_tile_and_thin_strips(kernel: int, meshes: dict) -> None:
    """Where nobody talks, which is so for a kernel of 2, the tile alone."""

    def raised(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weight, None, 2, kernel // 2 if kernel > 2 else 0)

    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 24, 36), mesh).requires_grad_()
        weight = torch.rand(4, 4, kernel, kernel).requires_grad_()
        kept = kept_for_backward(raised, x, weight)
        assert {storage(x.to_local()), storage(weight)} <= set(kept)
        _, _, height, width = x.to_local().shape
        around = 4 * 2 * kernel * (height + width + 2 * kernel)  # channels x 2 sides x ...
        strips = sum(kept.values()) - x.to_local().nbytes - weight.nbytes
        assert 0 <= strips <= (4 * around if kernel > 2 else 0)
        frozen = kept_for_backward(raised, x, weight.detach())
        assert set(frozen) == {storage(weight)}  # the gradient of the image reads no pixel


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def test_beside_large_weights_only_what_other_ranks_sent_is_kept(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(torch.rand(1, 32, 12, 12, dtype=torch.float64), mesh).detach().requires_grad_()
        weight = torch.rand(64, 32, 3, 3, dtype=torch.float64).requires_grad_()
        rows, cols = (12 // n for n in mesh.grid)
        strips = 2 * 32 * (rows + cols + 2) * 8
        kept = kept_for_backward(convolve, x, weight)
        assert sum(kept.values()) - x.to_local().nbytes - weight.nbytes <= strips
