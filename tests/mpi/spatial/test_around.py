"""What people put around a network: hooks, copies, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, SpatialTensor, average_gradients, gather_before, shard
from tests.mpi.equality import close, drawn

Meshes = dict[tuple[int, int], Mesh]
SIZE = 13, 11


class Block(nn.Module):
    """A bit of everything that talks: halos, statistics, a product over pixels, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=0)
        self.head = nn.Linear(4, 5)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.up(F.max_pool2d(self.down(x), 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def network(dtype: torch.dtype = torch.float64) -> Block:
    torch.manual_seed(0)
    return Block().to(dtype)


def image(dtype: torch.dtype = torch.float64) -> Tensor:
    return drawn(0, 2, 3, *SIZE).to(dtype)


def step(
    model: nn.Module, x: Tensor, forward: Callable[..., Tensor] | None = None
) -> dict[str, Tensor]:
    """One pass; everything that it leaves behind."""
    loss = (model if forward is None else forward)(x).square().sum()
    loss.backward()
    if isinstance(x, SpatialTensor):
        average_gradients(model, x.mesh)
    left = {f"grad {name}": value.grad for name, value in model.named_parameters()}
    left |= {f"buffer {name}": value.double() for name, value in model.named_buffers()}
    return {"loss": loss.detach(), **left}


def same(ours: dict[str, Tensor], plain: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        close(ours[name], value, f"{name} {what} ")


def plain_hooks(model: Block) -> nn.Module:
    model.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.down.register_forward_hook(lambda module, args, y: y + 1)
    model.norm.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    return model


def hooks_of_tensors(model: Block) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        x = model.norm(model.conv(x))
        x.register_hook(lambda grad: grad * 2)
        x.retain_grad()
        model.seen = x
        return model.head(model.up(model.down(x)).mean((2, 3)))

    return run


@pytest.mark.parametrize("hooked", [plain_hooks, hooks_of_tensors])
def test_hooks_see_split_tensors(hooked: Callable[[Block], Callable], meshes: Meshes) -> None:
    plain = network()
    expected = step(plain, image(), hooked(plain))
    for mesh in meshes.values():
        ours = network()
        same(step(ours, shard(image(), mesh), hooked(ours)), expected, f"on {mesh.grid}")
        if hooked is hooks_of_tensors:
            # in between, gradients are those of the sum of the ranks' losses: see the README
            kept = ours.seen.grad.full_tensor() / mesh.size
            close(kept, plain.seen.grad, f"kept gradient on {mesh.grid} ")


@pytest.mark.slow
def test_torch_compile_runs_the_network_as_it_is(meshes: Meshes) -> None:
    expected = step(network(), image())
    for mesh in meshes.values():
        torch.compiler.reset()
        ours = network()
        compiled = torch.compile(ours, backend="eager")
        same(step(ours, shard(image(), mesh), compiled), expected, f"on {mesh.grid}")


# --- gather_before: a module gets whole images, exactly


class Vgg(nn.Module):
    """Flattens its map in a forward of its own; two inputs of the head come by name."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return self.head(y, skip=y.sigmoid())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * 7 * 6, 3)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        assert not isinstance(x, SpatialTensor)
        assert not isinstance(skip, SpatialTensor)
        return self.linear((x * skip).view(len(x), -1))


def vgg() -> Vgg:
    torch.manual_seed(0)
    return Vgg().double()


def test_a_head_that_flattens_equals_one_process(meshes: Meshes) -> None:
    plain, whole = vgg(), image()
    before = vgg()(whole)
    expected = step(plain, whole.requires_grad_())
    for mesh in meshes.values():
        model, ours = vgg(), image().requires_grad_()
        gather_before(model, "head")
        same(step(model, shard(ours, mesh)), expected, f"on {mesh.grid}")
        close(ours.grad, whole.grad, f"gradient of the image on {mesh.grid} ")
    model = vgg()
    gather_before(model, ["head"])
    assert torch.equal(model(image()), before)  # whole images pass as they are
