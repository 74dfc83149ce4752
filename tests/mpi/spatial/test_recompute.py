"""Blocks of a split image that run again in backward: the same numbers, without talking."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import Mesh, average_gradients, recompute_blocks, shard
from spatialdl.models import resnet18
from tests.mpi.equality import close, every_mesh, meshes  # noqa: F401


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
        self.blocks, self.reentrant = blocks, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def blocks(*strides: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(stride) for stride in strides)).double()


def train(model: nn.Module, size: tuple[int, int], mesh: Mesh | None) -> dict[str, Tensor]:
    """Two steps; the image's gradient, the parameters' and the buffers."""
    draw = torch.Generator().manual_seed(2)
    image = torch.randn(2, 4, *size, dtype=torch.float64, generator=draw).requires_grad_()
    for _ in range(2):
        output = model(image if mesh is None else shard(image, mesh))
        output.square().sum().backward()
    if mesh is not None:
        average_gradients(model, mesh)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"image": image.grad, **grads, **dict(model.named_buffers())}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(found[name], value, f"{what}: {name} ")


SETTINGS = [((13, 11), (1, 2, 1)), ((6, 5), (2, 2, 1)), ((9, 16), (1, 1))]


@pytest.mark.parametrize(("size", "strides"), SETTINGS)
def test_recomputed_blocks_equal_one_process(size, strides, meshes: dict) -> None:  # noqa: F811
    expected = train(blocks(*strides), size, None)
    for mesh in meshes.values():
        model = blocks(*strides)
        assert len(recompute_blocks(model)) == len(strides)
        equal(train(model, size, mesh), expected, f"{size} on {mesh.grid}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("size", "strides"), SETTINGS)
def test_a_network_s_own_checkpoints_equal_one_process(
    size,
    strides,
    reentrant,
    meshes: dict,  # noqa: F811
) -> None:
    """Running statistics are updated twice then, as they are in one process."""
    expected = train(Checkpointed(blocks(*strides), reentrant), size, None)
    for mesh in meshes.values():
        found = train(Checkpointed(blocks(*strides), reentrant), size, mesh)
        equal(found, expected, f"{size} on {mesh.grid}, reentrant {reentrant}")


def test_recomputed_blocks_within_a_network_s_own_checkpoints(
    meshes: dict,  # noqa: F811
) -> None:
    size = 12, 9
    expected = train(blocks(1, 2), size, None)
    for mesh in meshes.values():
        model = Checkpointed(blocks(1, 2), reentrant=False)
        assert recompute_blocks(model) == ["blocks.0", "blocks.1"]
        found = train(model, size, mesh)
        found = {name.removeprefix("blocks."): value for name, value in found.items()}
        equal(found, expected, f"on {mesh.grid}")


class Convolutions(Block):
    """Where a rank has no pixels left, autograd keeps nothing of a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [(6, 5), (4, 9), (17, 4)])
def test_checkpoints_of_ranks_without_pixels(size, reentrant, meshes: dict) -> None:  # noqa: F811
    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Convolutions(stride) for stride in (2, 2, 1, 2)))
        return Checkpointed(layers, reentrant).double()

    def grads(mesh: Mesh | None) -> list[Tensor]:
        model = network()
        image = torch.linspace(-1, 1, 2 * 4 * size[0] * size[1], dtype=torch.float64)
        image = image.view(2, 4, *size).requires_grad_()
        output = model(image if mesh is None else shard(image, mesh))
        output.square().sum().backward()
        if mesh is not None:
            average_gradients(model, mesh)
        return [image.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = grads(None)
    for mesh in meshes.values():
        for ours, plain in zip(grads(mesh), expected, strict=True):
            close(ours, plain, f"{size} on {mesh.grid} ")


def test_dropout_in_recomputed_blocks_drops_the_same(meshes: dict) -> None:  # noqa: F811
    """Outside of `keyed` too, where ranks first agree on a seed in the middle of a block."""
    for mesh in meshes.values():
        x = shard(torch.rand(1, 4, 9, 8, dtype=torch.float64), mesh)
        model = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(), nn.Conv2d(4, 4, 3)) for _ in range(2))
        ).double()
        assert recompute_blocks(model) == ["0", "1"]
        kept: list[Tensor] = []
        for block in model:
            block[1].register_forward_hook(
                lambda _, __, y, kept=kept: kept.append(y.to_local() != 0)
            )
        model(x).sum().backward()
        assert len(kept) == 4
        assert torch.equal(kept[0], kept[3])  # backward begins at the end
        assert torch.equal(kept[1], kept[2])


def test_running_again_says_nothing_to_other_ranks(meshes: dict, monkeypatch) -> None:  # noqa: F811
    said: Counter[str] = Counter()
    for mesh in meshes.values():
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
            model = resnet18(num_classes=3, width=4).double()
            if again:
                recompute_blocks(model)
            x = shard(torch.rand(1, 3, 70, 66, dtype=torch.float64), mesh)
            loss = model(x).square().sum()
            said.clear()
            loss.backward()
            counts.append(dict(said))
        monkeypatch.undo()
        assert counts[0] == counts[1]
        assert mesh.grid == (1, 1) or counts[0]["all_reduce"] > 0


def test_backward_may_come_twice(meshes: dict) -> None:  # noqa: F811
    for mesh in meshes.values():
        model = blocks(1, 2)
        twin = copy.deepcopy(model)
        recompute_blocks(twin)
        x = shard(torch.rand(1, 4, 8, 9, dtype=torch.float64), mesh)
        for network in (model, twin):
            loss = network(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for ours, plain in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours.grad, plain.grad, f"on {mesh.grid} ")


@pytest.mark.parametrize("dims", [1, 3])
def test_signals_and_volumes(dims: int) -> None:
    torch.manual_seed(0)
    convolution, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    chain = [
        nn.Sequential(convolution(4, 4, 3, stride, 1), norm(4), nn.Sigmoid()) for stride in (1, 2)
    ]
    model = nn.Sequential(*chain).double()
    size = (9, 7, 6)[:dims]
    expected = train(copy.deepcopy(model), size, None)
    checkpointed = Checkpointed(model, reentrant=False)  # which updates statistics twice
    expected_twice = train(copy.deepcopy(checkpointed), size, None)
    for mesh in every_mesh(dims).values():
        recomputed = copy.deepcopy(model)
        recompute_blocks(recomputed)
        equal(train(recomputed, size, mesh), expected, f"{size} on {mesh.grid} ")
        found = train(copy.deepcopy(checkpointed), size, mesh)
        equal(found, expected_twice, f"checkpoints of {size} on {mesh.grid} ")
