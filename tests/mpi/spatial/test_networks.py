"""Networks of others on split images, against one process, and what people put around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import (
    Mesh,
    SpatialTensor,
    UnsupportedSpatialOp,
    gather_before,
    init_mesh,
)
from spatialdl.spatial.checking.compare import Numbers, differences, one_step
from tests.mpi.equality import close, drawn, slow_cases
from tests.mpi.zoo import NETWORKS, Entry
from tests.mpi.zoo_attention import ATTENTION, SIGNALS, TUBES
from tests.mpi.zoo_vision_transformers import VISION_TRANSFORMERS
from tests.mpi.zoo_volumes import VOLUMES
from tests.mpi.zoo_windows import WINDOWS

GRIDS = {2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (5, 1), 6: (2, 3)}
ALL_GRIDS = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2)], 5: [(5, 1)], 6: [(2, 3)]}
GRIDS_OF_VOLUMES: dict[int, list[tuple[int, ...]]] = {
    2: [(2, 1, 1)],
    3: [(1, 3, 1)],
    4: [(1, 2, 2), (2, 2, 1)],
    5: [(1, 1, 5)],
    6: [(3, 1, 2)],
}

FAST = {
    "transformers ResNet bottleneck",
    "transformers ConvNext",
    "transformers RegNet Y",
    "transformers MobileNetV1",
    "transformers SegFormer",
    "transformers DINOv2",
    "monai SegResNet deconvolution",
    "monai HighResNet",
    "monai AutoEncoder",
    "monai Classifier",
    "monai Regressor",
    "monai Discriminator",
}

REFUSED = {
    "transformers SuperPoint": "max_pool2d on a split image takes",
    "monai Quicknat": "indices into a split image",
}
"""The networks that are refused, and what the refusal says."""

FAST_VOLUMES = {"UNet residual, batch norm", "DynUNet", "HighResNet", "SegResNetDS", "Classifier"}

FAST_TRANSFORMERS = {
    "transformers BEiT",
    "transformers DINOv2 registers",
    "transformers SAM",
    "transformers SigLIP attention pooling",
    "transformers Hiera",
}

REFUSED_TRANSFORMERS = {
    "transformers EoMT": "a split tensor cannot be written to a whole one in place",
    "transformers Mask2Former": "cat is not supported",
}


def _exact(networks: Iterable[str], fast: set[str], refused: Container[str] = ()) -> list[object]:
    kept = [name for name in networks if name not in refused]
    return [*(n for n in kept if n in fast), *slow_cases(n for n in kept if n not in fast)]


ALL = {**NETWORKS, **VISION_TRANSFORMERS}


@pytest.mark.parametrize(
    "name",
    [
        *_exact(NETWORKS, FAST, REFUSED),
        *_exact(VISION_TRANSFORMERS, FAST_TRANSFORMERS, REFUSED_TRANSFORMERS),
    ],
)
def test_a_training_step_equals_that_of_one_process(name: str) -> None:
    _compare(ALL[name], GRIDS[MPI.COMM_WORLD.size])


@pytest.mark.parametrize("name", _exact(VOLUMES, FAST_VOLUMES))
def test_a_training_step_on_volumes_equals_that_of_one_process(name: str) -> None:
    _compare(VOLUMES[name], *GRIDS_OF_VOLUMES[MPI.COMM_WORLD.size])


SMALL = {**ATTENTION, **WINDOWS}


@pytest.mark.parametrize("name", SMALL)
def test_steps_of_small_transformers_equal_those_of_one_process(name: str) -> None:
    for grid in ALL_GRIDS[MPI.COMM_WORLD.size]:
        _compare_steps(SMALL[name], grid)


@pytest.mark.parametrize("name", _exact([*SIGNALS, *TUBES], {"a signal", "tubes, mean"}))
def test_steps_on_signals_and_tubes_equal_those_of_one_process(name: str) -> None:
    size = MPI.COMM_WORLD.size
    for grid in [(size,)] if name in SIGNALS else GRIDS_OF_VOLUMES[size]:
        _compare_steps({**SIGNALS, **TUBES}[name], grid)


def _compare_steps(entry: Entry, grid: tuple[int, ...]) -> None:
    plain, mesh = entry.network(), init_mesh(grid)
    ours = copy.deepcopy(plain)
    for step in range(2):
        image = entry.image() * (1 + step)
        numbers = one_step(ours, image, (), mesh), one_step(plain, image)
        assert [str(difference) for difference in differences(*numbers)] == [], (grid, step)
        for network in (ours, plain):
            torch.optim.SGD(network.parameters(), 0.01).step()


def _compare(entry: Entry, *grids: tuple[int, ...]) -> None:
    network = entry.network()
    torch.manual_seed(2)  # stochastic depth draws a number per sample, the same on every rank
    plain = one_step(copy.deepcopy(network), entry.image(), tuple(entry.arguments))
    assert max(float(grad.abs().max()) for grad in plain.gradients.values() if grad is not None) > 0
    for grid in grids:
        torch.manual_seed(2)
        arguments = tuple(entry.arguments)
        ours = one_step(copy.deepcopy(network), entry.image(), arguments, init_mesh(grid))
        assert [str(difference) for difference in differences(ours, plain)] == [], grid


@pytest.mark.parametrize("name", slow_cases([*REFUSED, *REFUSED_TRANSFORMERS]))
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    entry, mesh = ALL[name], init_mesh(GRIDS[MPI.COMM_WORLD.size])
    with pytest.raises(UnsupportedSpatialOp, match={**REFUSED, **REFUSED_TRANSFORMERS}[name]):
        one_step(entry.network(), entry.image(), tuple(entry.arguments), mesh)


def test_the_lists_name_networks_that_are_there() -> None:
    assert FAST | set(REFUSED) <= set(NETWORKS)
    assert not FAST & set(REFUSED)
    assert FAST_TRANSFORMERS | set(REFUSED_TRANSFORMERS) <= set(VISION_TRANSFORMERS)
    assert set(VOLUMES) >= FAST_VOLUMES


# --- hooks, torch.compile


Meshes = dict[tuple[int, int], Mesh]


class Block(nn.Module):
    """A bit of everything that talks: halos, statistics, a product over pixels, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=0)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.up(F.max_pool2d(self.down(x), 3, 1, 1)).mean((2, 3)))


class Hooked(Block):
    """Hooks of its modules change what they are given; hooks of tensors their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.down.register_forward_hook(lambda module, args, y: y + 1)
        self.norm.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x.register_hook(lambda grad: grad * 2)
        x.retain_grad()
        self.seen = x
        return self.head(self.up(self.down(x)).mean((2, 3)))


def step(make: Callable[[], nn.Module], mesh: Mesh | None = None) -> tuple[nn.Module, Numbers]:
    torch.manual_seed(0)
    model = make().double()
    return model, one_step(model, drawn(0, 2, 3, 13, 11), (), mesh)


def test_hooks_see_split_tensors(meshes: Meshes) -> None:
    plain, expected = step(Hooked)
    for mesh in meshes.values():
        ours, numbers = step(Hooked, mesh)
        assert [str(difference) for difference in differences(numbers, expected)] == [], mesh.grid
        # in between, gradients are those of the sum of the ranks' losses: see the README
        kept = ours.seen.grad.full_tensor() / mesh.size
        close(kept, plain.seen.grad, f"kept gradient on {mesh.grid} ")


@pytest.mark.slow
def test_torch_compile_runs_the_network_as_it_is(meshes: Meshes) -> None:
    _, expected = step(Block)
    for mesh in meshes.values():
        torch.compiler.reset()
        _, found = step(lambda: torch.compile(Block(), backend="eager"), mesh)
        grads, buffers = (
            {name.removeprefix("_orig_mod."): value for name, value in values.items()}
            for values in (found.gradients, found.buffers)
        )
        assert differences(found._replace(gradients=grads, buffers=buffers), expected) == []


# --- gather_before: a module gets whole images, exactly


class Vgg(nn.Module):
    """Flattens its map in a forward of its own; two inputs of the head come by name."""

    def __init__(self, gathers: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = Head()
        gather_before(self, ["head"] if gathers else None)

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


def test_a_head_that_flattens_equals_one_process(meshes: Meshes) -> None:
    _, expected = step(lambda: Vgg(gathers=False))
    assert differences(step(Vgg)[1], expected) == []  # whole images pass as they are
    for mesh in meshes.values():
        assert differences(step(Vgg, mesh)[1], expected) == [], mesh.grid
