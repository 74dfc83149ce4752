"""What people put around a network: autocast, checkpoints, hooks, copies, torch.compile."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl import Mesh, SpatialTensor, average_gradients, shard
from tests.mpi.equality import close, parameter

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
    return parameter(random.Random(0), 2, 3, *SIZE).to(dtype)


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints_of_pytorch(use_reentrant: bool, meshes: Meshes) -> None:
    """Recomputing talks again, in the same order on all ranks."""

    def forward(model: Block) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = model.norm(model.conv(x))
            x = checkpoint(
                lambda y: model.up(F.relu(model.down(y))), x, use_reentrant=use_reentrant
            )
            return model.head(x.mean((2, 3)))

        return run

    plain = network()
    expected = step(plain, image(), forward(plain))
    for mesh in meshes.values():
        ours = network()
        same(step(ours, shard(image(), mesh), forward(ours)), expected, f"on {mesh.grid}")


def test_hooks_see_split_tensors(meshes: Meshes) -> None:
    def hooked(model: Block) -> Callable[[Tensor], Tensor]:
        model.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.down.register_forward_hook(lambda module, args, y: y + 1)
        model.norm.register_full_backward_hook(
            lambda module, grads_in, grads_out: (grads_in[0] * 3,)
        )
        return model

    plain = network()
    expected = step(plain, image(), hooked(plain))
    for mesh in meshes.values():
        ours = network()
        same(step(ours, shard(image(), mesh), hooked(ours)), expected, f"on {mesh.grid}")


def test_hooks_on_tensors(meshes: Meshes) -> None:
    def hooked(model: Block) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = model.norm(model.conv(x))
            x.register_hook(lambda grad: grad * 2)
            x.retain_grad()
            y = model.head(model.up(model.down(x)).mean((2, 3)))
            model.seen = x
            return y

        return run

    plain = network()
    expected = step(plain, image(), hooked(plain))
    for mesh in meshes.values():
        ours = network()
        same(step(ours, shard(image(), mesh), hooked(ours)), expected, f"on {mesh.grid}")
        # in between, gradients are those of the sum of the ranks' losses: see the README
        kept = ours.seen.grad.full_tensor() / mesh.size
        close(kept, plain.seen.grad, f"kept gradient on {mesh.grid} ")


def test_copies_and_state(meshes: Meshes) -> None:
    expected = step(network(), image())
    for mesh in meshes.values():
        ours = network()
        step(ours, shard(image(), mesh))
        twin = copy.deepcopy(ours)
        fresh = network()
        assert fresh.load_state_dict(twin.state_dict()) is not None
        fresh = copy.deepcopy(network())
        same(step(fresh, shard(image(), mesh)), expected, f"on {mesh.grid}")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], AbstractContextManager], meshes: Meshes) -> None:
    plain = network().eval()
    with mode():
        expected = plain(image())
        dense = plain.features(image())
    for mesh in meshes.values():
        ours = network().eval()
        with mode():
            x = shard(image(), mesh)
            close(ours(x), expected, f"on {mesh.grid} ")
            close(ours.features(x).full_tensor(), dense, f"features on {mesh.grid} ")
        assert not ours(shard(image(), mesh)).is_inference()


def test_inputs_made_outside_inference_mode(meshes: Meshes) -> None:
    for mesh in meshes.values():
        x = shard(image(), mesh)
        ours = network().eval()
        with torch.inference_mode():
            close(ours(x), network().eval()(image()), f"on {mesh.grid} ")


@pytest.mark.slow
def test_torch_compile_runs_the_network_as_it_is(meshes: Meshes) -> None:
    expected = step(network(), image())
    for mesh in meshes.values():
        torch.compiler.reset()
        ours = network()
        compiled = torch.compile(ours, backend="eager")
        same(step(ours, shard(image(), mesh), compiled), expected, f"on {mesh.grid}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, meshes: Meshes) -> None:
    """The same types as in one process, and numbers that differ by their rounding only."""
    plain = network(torch.float32)
    exact = plain.features(image(torch.float32)).detach()
    with torch.autocast("cpu", dtype):
        features = plain.features(image(torch.float32))
        expected = plain(image(torch.float32))
    rounding = (features - exact).abs().max()
    assert rounding > 0
    for mesh in meshes.values():
        ours = network(torch.float32)
        ours.features(shard(image(torch.float32), mesh))  # as the plain one did for `exact`
        with torch.autocast("cpu", dtype):
            x = shard(image(torch.float32), mesh)
            found = ours.features(x)
            logits = ours(x)
            logits.float().sum().backward()
        assert (found.dtype, logits.dtype) == (features.dtype, expected.dtype)
        assert (found.full_tensor() - exact).abs().max() < 3 * rounding
        assert all(value.grad.dtype == torch.float32 for value in ours.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype: torch.dtype, meshes: Meshes) -> None:
    """Not further from the exact numbers than one process is, but for a small factor."""
    exact = step(network(), image(dtype).double())
    rounded = network().to(dtype)
    plain = step(rounded, image(dtype))
    for mesh in meshes.values():
        ours = step(network().to(dtype), shard(image(dtype), mesh))
        exact.pop("grad conv.bias", None)  # zero but for rounding: a norm follows
        for name, value in exact.items():
            assert ours[name].dtype == plain[name].dtype
            error = (ours[name].double() - value).abs().max()
            scale = value.abs().max().clamp(min=1e-3)
            allowed = (plain[name].double() - value).abs().max()
            assert error <= 4 * allowed + 20 * torch.finfo(dtype).eps * scale, name
