"""Layouts in a user's own loop equal plain PyTorch that accumulates over slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.layout.layout import even_bounds

WORLD = MPI.COMM_WORLD
SIZE, BATCH, STEPS = (3, 13, 11), 7, 3
PP = {"stages": 2, "microbatches": 3}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        *({**PP, "schedule": name} for name in ("gpipe", "1f1b")),
        {"stages": 2, "microbatches": 2, "schedule": "gems"},
        {"stages": 2, "microbatches": 4, "schedule": "basic", "clip": 0.05},
        {"stages": 4, "microbatches": 4, "schedule": "interleaved", "clip": 0.05},
        {"grid": (2, 1), "microbatches": 2},
        {"grid": (1, 2), "tiles": True},
        {"grid": (2, 1), "maps": True, "microbatches": 2},
        {"data": 2},
        {"tensor": 2},
    ],
    3: [
        {"stages": 2, "grid": (2, 1), "microbatches": 2, "schedule": "1f1b"},
        {"stages": 3, "microbatches": 3, "schedule": "1f1b", "only_needed": True},
        {"stages": 2, "grid": (2, 1), "microbatches": 2, "schedule": "gems"},
    ],
    4: [
        {"stages": 2, "data": 2, "microbatches": 2, "schedule": "1f1b", "clip": 0.05},
        {"grid": (2, 2), "tiles": True, "microbatches": 2},
        {"stages": 2, "spatial_stages": 2, "grid": (2, 1), "maps": True, "microbatches": 2},
    ],
}


def network(maps: bool) -> nn.Sequential:
    torch.manual_seed(1)
    head = (
        [nn.Conv2d(4, 5, 1)]
        if maps
        else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)]
    )
    body = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 5, padding=2),
    ]
    return nn.Sequential(*body, nn.ReLU(), *head).double()


class LearnedLoss(nn.Module):
    """Weighs its values by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return (losses * torch.exp(-self.log_variance)).mean() + self.log_variance.sum()


def batch(step: int, maps: bool) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    shape = (BATCH, *SIZE[1:]) if maps else (BATCH,)
    images = torch.randn(BATCH, *SIZE, dtype=torch.float64, generator=draw)
    return images, torch.randint(5, shape, generator=draw)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reference(
    microbatches: int, data: int, maps: bool, clip: float | None
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model, criterion = network(maps), LearnedLoss()
    steps, losses = optimizer([*model.parameters(), *criterion.parameters()]), []
    for step in range(STEPS):
        images, targets = batch(step, maps)
        steps.zero_grad()
        total = 0.0
        for start, stop in pairwise(even_bounds(BATCH, microbatches)):
            for first, last in pairwise(even_bounds(stop - start, data)):
                own = slice(start + first, start + last)
                share = (last - first) / BATCH
                loss = criterion(model(images[own]), targets[own]) * share
                loss.backward()
                total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
        losses.append(total)
    with torch.no_grad():
        outputs = model.eval()(batch(STEPS, maps)[0])
    return losses, model.state_dict() | criterion.state_dict(), outputs


def part_of(pipeline: spatialdl.Pipeline, images: Tensor) -> Tensor | None:
    if pipeline.box is None:
        return None
    r0, r1, c0, c1 = pipeline.box
    return images[:, :, r0:r1, c0:c1]


def name(words: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in words.items()).replace(" ", "_")


@pytest.mark.parametrize("words", LAYOUTS.get(WORLD.size, []), ids=name)
def test_equals_one_process(words: dict[str, Any], world: Communicator) -> None:
    words = dict(words)
    maps, clip = words.pop("maps", False), words.pop("clip", None)
    tiles, only_needed = words.pop("tiles", False), words.pop("only_needed", False)
    model = network(maps)
    if WORLD.rank == 1:  # those of rank 0 count
        nn.init.zeros_(next(model.parameters()))
    criterion = LearnedLoss()
    if WORLD.rank == 1:
        nn.init.zeros_(criterion.log_variance)
    pipeline = spatialdl.Pipeline(model, image_size=SIZE, criterion=criterion, comm=world, **words)
    steps, losses = optimizer([*pipeline.parameters(), *criterion.parameters()]), []
    for step in range(STEPS):
        images, targets = batch(step, maps)
        if tiles or only_needed:
            given = (part_of(pipeline, images), targets if pipeline.needs_targets else None)
            losses.append(pipeline.step(*given, samples=BATCH))
        else:
            losses.append(pipeline.step(images, targets))
        if clip is not None:
            pipeline.clip_grad_norm_(clip)
        steps.step()
    state, outputs = pipeline.state_dict(), pipeline.evaluate(batch(STEPS, maps)[0])
    expected = reference(words.get("microbatches", 1), words.get("data", 1), maps, clip)
    assert losses == pytest.approx(expected[0], abs=1e-10)
    state |= criterion.state_dict()
    assert list(state) == list(expected[1])
    for key, value in expected[1].items():
        torch.testing.assert_close(state[key], value, atol=1e-10, rtol=0, msg=key)
    torch.testing.assert_close(outputs, expected[2], atol=1e-10, rtol=0)
    pipeline.load_state_dict(network(maps).state_dict())
    again = pipeline.state_dict()
    assert all(torch.equal(again[key], one) for key, one in network(maps).state_dict().items())


class ReturnsEarly(nn.Module):
    """Returns a value that its first stage makes, beside that of the last one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.stem, self.aux = kind, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.body, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.stem(x)
        early = {"auxiliary head": self.aux(z), "latent": z, "image": x}[self.kind]
        return {"out": self.head(self.body(z.relu()).relu()), "early": early}


def loss_of_both(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    out, early = outputs["out"], outputs["early"]
    return F.cross_entropy(out, target % 3) + early.square().mean() + (out * early.mean()).mean()


@pytest.mark.parametrize("kind", ["auxiliary head", "latent", "image"])
def test_outputs_of_early_stages_reach_the_loss(kind: str, world: Communicator) -> None:
    layouts: dict[int, dict[str, Any]] = {
        2: {"stages": 2, "cut": ["body"]},
        3: {"stages": 3, "cut": ["body", "head"], "schedule": "1f1b"},
        4: {"stages": 2, "cut": ["body"], "grid": (2, 1), "spatial_stages": 2},
    }
    if world.size not in layouts:
        pytest.skip("stages have at least two ranks")
    (images, targets), plain = batch(0, maps=True), ReturnsEarly(kind)
    expected = 0.0
    for start, stop in pairwise(even_bounds(BATCH, 2)):
        loss = loss_of_both(plain(images[start:stop]), targets[start:stop]) * (stop - start) / BATCH
        loss.backward()
        expected += loss.item()
    given = {"image_size": SIZE, "criterion": loss_of_both, "comm": world, "microbatches": 2}
    pipeline = spatialdl.Pipeline(ReturnsEarly(kind), **given, **layouts[world.size])
    assert pipeline.step(images, targets) == pytest.approx(expected, abs=1e-10)
    grads = {name: one.grad for name, one in plain.named_parameters()}
    for name, one in pipeline.named_parameters():
        torch.testing.assert_close(one.grad, grads[name], atol=1e-10, rtol=0, msg=name)


@pytest.mark.world(2)
def test_a_mesh_is_one_stage(world: Communicator) -> None:
    mesh = spatialdl.init_mesh(grid=(2, 1), comm=WORLD)
    pipeline = spatialdl.Pipeline(
        network(False), mesh, image_size=SIZE, criterion=LearnedLoss(), microbatches=2
    )
    images, targets = batch(0, maps=False)
    expected = reference(2, 1, maps=False, clip=None)[0][0]
    whole = spatialdl.shard(images, mesh)
    assert pipeline.step(whole, targets) == pytest.approx(expected, abs=1e-10)


@pytest.mark.world(2)
def test_ranks_with_other_batches_are_refused(world: Communicator) -> None:
    pipeline = spatialdl.Pipeline(
        network(False), stages=2, image_size=SIZE, criterion=F.cross_entropy, comm=world
    )
    images, targets = batch(0, maps=False)
    with pytest.raises(
        ValueError, match=r"images .* has different values on rank 1 than on rank 0"
    ):
        pipeline.step(images + WORLD.rank, targets)
    with pytest.raises(
        ValueError, match=r"targets .* has different values .*: give every rank the same"
    ):
        pipeline.step(images, (targets + WORLD.rank) % 5)
    own = BATCH - WORLD.rank
    with pytest.raises(ValueError, match="ranks have batches of different size"):
        pipeline.step(images[:own], targets[:own])


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused(world: Communicator) -> None:
    def made(**words: Any) -> spatialdl.Pipeline:
        given = {"image_size": SIZE, "criterion": F.cross_entropy, "comm": world, **words}
        return spatialdl.Pipeline(network(False), **given)

    for words, said in (
        ({"stages": 3}, "the pipeline needs .* = 3 ranks, but this world has 2"),
        ({"stages": 2, "schedule": "chimera"}, "schedule=chimera is unknown: take one of gpipe"),
        ({"grid": (2, 1), "image_size": (3, 8)}, r"image_size=\(3, 8\) has 1 spatial dims"),
        ({"grid": (2, 1), "image_size": (3, 1, 8)}, "an image of 1x8 is smaller than the grid 2x1"),
        ({"grid": (2, 1), "spatial_stages": 0}, "spatial_stages=0 of stages=1 cannot cut"),
        ({"data": 2, "microbatches": 0}, "microbatches=0"),
        ({"data": True}, "data=True"),
        ({"data": 2, "mixed": torch.float16}, "mixed=torch.float16 is not supported"),
    ):
        with pytest.raises(ValueError, match=said):
            made(**words)
    pipeline = made(data=2)
    images, targets = batch(0, maps=False)
    for given, said in (
        ((images[:, :, 1:], targets), r"images must be \(N, 3, 13, 11\).* got \(7, 3, 12, 11\)"),
        ((images, targets[1:]), "must have the same length, got 7 images, 6 targets"),
        ((images[:0], targets[:0]), "at least one sample"),
        ((None, None), "give the number of samples="),
        ((images, None), "needs targets"),
        ((None, targets), "needs images"),
    ):
        with pytest.raises(ValueError, match=said):
            pipeline.step(*given)
    with pytest.raises(ValueError, match=r"it has no 0\.weight"):
        pipeline.load_state_dict({})
