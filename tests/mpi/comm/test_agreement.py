"""Ranks that have other images, labels or weights are refused, all of the grid alike."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count, pairwise

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import (
    CommMismatch,
    Mesh,
    SpatialParallel,
    average_gradients,
    from_local,
    init_mesh,
    shard,
)
from spatialdl.comm import check
from spatialdl.comm.agreement import FIRST, difference, is_due
from spatialdl.spatial import gradient_checks as agreed

pytestmark = pytest.mark.world(2, 3, 4)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = RANK == SIZE - 1


@pytest.fixture
def mesh() -> Mesh:
    return init_mesh((SIZE, 1))


def image(seed: int = 0, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 3, 16, 12), generator=draw, dtype=torch.float64)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def changed(pixels: Tensor) -> Tensor:
    copy = pixels.clone()
    copy[0, 0, 3, 3] += 1
    return copy


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: image(seed=1), "different values"),
        (lambda: changed(image()), "different values"),
        (lambda: image().flip(-1), "different values"),
        (lambda: image(0, 2, 3, 20, 12), r"\(2, 3, 20, 12\)"),
        (lambda: image(0, 1, 3, 16, 12), r"\(1, 3, 16, 12\)"),
        (lambda: image().float(), "float32"),
        (lambda: image(seed=1) > 0, "bool"),
    ],
)
def test_other_images_are_refused(other: Callable[[], Tensor], said: str, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=rf"image .*{said}.*the same image on all ranks of a grid"):
        shard(other() if LAST else image(), mesh)


def test_tiles_of_other_images_are_refused(mesh: Mesh) -> None:
    size = (20, 12) if LAST else (16, 12)
    row0, row1, col0, col1 = mesh.box(size)
    tile = image(RANK, 2, 3, row1 - row0, col1 - col0)
    with pytest.raises(ValueError, match=r"of different images: .* is float64, \(2, 3\) x \(\d+"):
        from_local(tile, mesh, size)
    samples = 1 if LAST else 2
    row0, row1, col0, col1 = mesh.box((16, 12))
    with pytest.raises(ValueError, match="tiles of different images"):
        from_local(image(0, samples, 3, row1 - row0, col1 - col0), mesh, (16, 12))


@pytest.mark.parametrize("size", [(17,), (17, 5, 6)])
def test_tiles_of_signals_and_volumes_may_be_of_other_sizes_but_not_channels(
    size: tuple[int, ...],
) -> None:
    """17 places are divided evenly by no number of ranks."""
    mesh = init_mesh((SIZE, *(1 for _ in size[1:])))
    first, last = mesh.box(size)[:2]
    tile = image(RANK, 2, 3, last - first, *size[1:])
    assert from_local(tile, mesh, size).shape == (2, 3, *size)
    with pytest.raises(ValueError, match=r"of different images: .* is float64, \(2, [23]\) x \(17"):
        from_local(tile[:, :2] if LAST else tile, mesh, size)


def test_tiles_and_replicas_have_images_of_their_own(mesh: Mesh) -> None:
    row0, row1, col0, col1 = mesh.box((16, 12))
    from_local(image(RANK, 2, 3, row1 - row0, col1 - col0), mesh, (16, 12))
    shard(image() * (1 + 1e-9 * RANK), mesh)  # rounded otherwise
    replicas = init_mesh((1, 1), data=SIZE)
    model = network()
    loss = F.cross_entropy(model(shard(image(RANK), replicas)), torch.tensor([0, RANK % 3]))
    loss.backward()
    average_gradients(model, replicas)


def test_a_program_with_accelerate_is_told_what_to_do_with_its_loader(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `prepare` gives each process other samples, with other labels."""
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    advice = "do not pass it the DataLoader, and use DistributedSampler"
    with pytest.raises(ValueError, match=f"image .*different values on rank.*{advice}"):
        shard(image(seed=RANK), mesh)
    with pytest.raises(ValueError, match=f"gradient of the loss.*{advice}"):
        of_classes(mesh, LAST)


def of_classes(mesh: Mesh, last: bool) -> None:
    labels = torch.tensor([0, 2 if last else 1])
    F.cross_entropy(network()(shard(image(), mesh)), labels).backward()


def of_a_gathered_image(mesh: Mesh, last: bool) -> None:
    x = shard(image(), mesh) * nn.Parameter(torch.ones((), dtype=torch.float64))
    F.mse_loss(x.full_tensor(), image(seed=int(last))).backward()


def of_pixels(mesh: Mesh, last: bool) -> None:
    labels = torch.zeros(2, 16, 12, dtype=torch.int64)
    labels[0, 0, 0] = last
    F.cross_entropy(shard(image(), mesh), labels)


def of_numbers(mesh: Mesh, last: bool) -> None:
    target = torch.zeros(2, 3, 16, 12, dtype=torch.float64)
    target[0, :, 0, 0] = last
    F.mse_loss(shard(image(), mesh), target)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (of_classes, "different losses: use the same labels"),
        (of_a_gathered_image, "different losses: use the same labels"),
        (of_pixels, "same labels, pixel weights and masks"),
        (of_numbers, "same labels, pixel weights and masks"),
    ],
)
def test_other_labels_are_refused(
    step: Callable[[Mesh, bool], None], said: str, mesh: Mesh
) -> None:
    with pytest.raises(ValueError, match=said):
        step(mesh, LAST)


def test_other_weights_are_refused(mesh: Mesh) -> None:
    model = network()
    labels = torch.tensor([0, 1])
    F.cross_entropy(model(shard(image(), mesh)), labels).backward()
    average_gradients(model, mesh)
    with torch.no_grad():
        model[0].bias[0] += LAST
    with pytest.raises(
        ValueError, match=r"different weights: parameter 1 .* different values on rank"
    ):
        average_gradients(model, mesh)
    wrapped = SpatialParallel(network(seed=RANK), mesh)
    with torch.no_grad():
        wrapped.module[4].bias[0] += LAST  # after it has made them alike
    loss = wrapped(shard(image(), mesh)).sum()
    with pytest.raises(ValueError, match=r"different weights|different losses"):
        loss.backward()


class Squeezed(nn.Module):
    """Whole tensors on the way, of which the gradients are parts, and a loss of a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * self.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid()
        return (x - x.mean((2, 3), keepdim=True)).relu()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": lambda x: x.square().mean(),
    "pooled": lambda x: F.adaptive_avg_pool2d(x, 1).square().sum(),
    "both": lambda x: x.square().mean() + x.mean((2, 3)).exp().sum(),
    "of the own tile": lambda x: x.to_local().square().sum(),
}


@pytest.mark.parametrize("name", [*LOSSES, "a split gradient"])
def test_what_ranks_may_have_of_their_own_is_not_refused(name: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = Squeezed().double()
    output = model(shard(image(), mesh))
    if name == "a split gradient":
        output.backward(torch.ones_like(output))
    else:
        LOSSES[name](output).backward()
    average_gradients(model, mesh)


def test_labels_behind_the_last_image_that_is_compared(mesh: Mesh) -> None:
    """The loss is not watched, and what the image brings was taken for its gradient."""
    last = next(number for number in count(1) if not is_due(number + 1))
    for _ in range(last):
        x = shard(image().requires_grad_(), mesh)
    whole = x.full_tensor()
    labels = shard(torch.ones(2, 16, 12, dtype=torch.int64), mesh)
    F.cross_entropy(whole + 1, labels).backward()


def test_ranks_that_divide_channels_have_one_image_and_one_label() -> None:
    mesh = init_mesh((1, 1), tensor=SIZE)
    with pytest.raises(ValueError, match=r"image .* has different values on rank"):
        shard(changed(image()) if LAST else image(), mesh)
    with pytest.raises(ValueError, match=r"tile .* has different values .* divide channels"):
        from_local(changed(image()) if LAST else image(), mesh, (16, 12))
    model = SpatialParallel(network(), mesh)
    for labels in (torch.tensor([0, 1]), torch.tensor([0, 2])):
        loss = F.cross_entropy(model(shard(image(), mesh)), labels)
        loss.backward()
    other = torch.tensor([2, 2]) if LAST else torch.tensor([0, 1])
    loss = F.cross_entropy(model(shard(image(), mesh)), other)
    with pytest.raises(ValueError, match="gradient of the loss"):
        loss.backward()


def test_ranks_that_have_parted_unnoticed_are_named(mesh: Mesh) -> None:
    check.enable(False)
    try:
        x = shard(image(), mesh)
        check.agree(mesh.grid_comm, "an exchange" if LAST else "a sum")
        with pytest.raises(CommMismatch, match=r"ranks call different operations: .*an exchange"):
            shard(image(), mesh)
        assert x.shape == (2, 3, 16, 12)
    finally:
        check.enable()
        check._groups.clear()


def test_it_can_be_switched_off() -> None:
    mesh = init_mesh((SIZE, 1), check=False)
    check.enable()
    shard(image(seed=RANK), mesh)


def test_most_steps_are_not_compared(mesh: Mesh) -> None:
    due = [number for number in range(1, 10_000) if is_due(number)]
    assert due[:FIRST] == list(range(1, FIRST + 1))
    assert len(due) < 80
    assert max(later - number for number, later in pairwise(due)) <= 1024
    for _ in range(FIRST + 4):
        x = shard(image(), mesh)
    assert mesh.agreement is not None
    assert not mesh.agreement.compares
    shard(image(seed=RANK), mesh)  # until it is due again
    assert x.shape == (2, 3, 16, 12)


def test_values_that_differ_are_named_with_the_ranks_and_hosts_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = init_mesh((SIZE, 1)).comm
    assert difference(comm, {"a": 1}) == ""
    others = f"rank{'s' * (SIZE > 2)} {', '.join(map(str, range(SIZE - 1)))}"
    own = {"a": 1, "b": 3 if LAST else 2} | ({} if LAST else {"c": 4})
    said = f"b is 2 on {others}, 3 on rank {SIZE - 1}, c is 4 on {others}, missing on rank "
    assert difference(comm, own) == f"{said}{SIZE - 1}"
    monkeypatch.setattr("socket.gethostname", lambda: f"node{int(LAST)}")
    said = f"b is 2 on {others} (node0), 3 on rank {SIZE - 1} (node1)"
    assert difference(comm, {"a": 1, "b": 3 if LAST else 2}) == said
    much = difference(comm, {f"k{n}": f"{RANK}" * 200 for n in range(9)})
    assert much.count(" is ") == 5
    assert much.endswith(", and 4 more")
    assert len(much) < 2500


@pytest.fixture
def warns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(agreed._Gradients, "has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("how", ["forgotten", "averaged", "wrapped", "not split", "beside it"])
def test_a_step_on_gradients_that_were_never_averaged_warns(
    how: str, mesh: Mesh, warns: None
) -> None:
    model, beside = network(), nn.Parameter(torch.ones(()))
    used = SpatialParallel(model, mesh) if how in ("wrapped", "beside it") else model
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
    x = image() if how == "not split" else shard(image(), mesh)
    used(x * beside.exp() if how == "beside it" else x).sum().backward()
    if how == "averaged":
        average_gradients(model, mesh)
    if how in ("forgotten", "beside it") and RANK == 0:
        with pytest.raises(UserWarning, match=r"SGD steps on .* call spatialdl\.average_gradients"):
            optimizer.step()
        return
    optimizer.step()


@pytest.mark.parametrize("averages", [True, False])
def test_a_step_with_a_closure_is_looked_at_when_its_backward_is_over(
    averages: bool, mesh: Mesh, warns: None
) -> None:
    """Lightning accumulates before a step, and runs the last backward within it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(shard(image(), mesh)).sum().backward()  # accumulated

    def closure() -> torch.Tensor:
        loss = model(shard(image(), mesh)).sum()
        loss.backward()
        if averages:
            average_gradients(model, mesh)
        return loss

    if averages or RANK > 0:
        optimizer.step(closure)
        return
    with pytest.raises(UserWarning, match="never averaged"):
        optimizer.step(closure)
