"""What a run has come to, and which samples its ranks have seen, as a small network notes them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spatialdl import SpatialTensor
from spatialdl.comm.launch import launched
from spatialdl.data.normalisation import Normalisation
from tests.training.checkpoints import networks
from tests.training.checkpoints.runs import table

NOT_TIMED = ("step", "epoch", "loss", "learning_rate", "loss_scale", "skipped")
"""Columns of ``metrics.csv`` that do not depend on how busy the machine is."""

_PROGRESS = ("step", "epoch", "batch", "best", "early_stopping", "optimizer", "update")


def rows(run_dir: Path) -> list[dict[str, str]]:
    return [
        {key: value for key, value in row.items() if key in NOT_TIMED}
        for row in table(run_dir / "metrics.csv")
    ]


def state(
    run_dir: Path, name: str = "latest", files: str = "stage-*.safetensors"
) -> dict[str, torch.Tensor]:
    """Weights, buffers, averages and optimizer state of a checkpoint, whatever the layout."""
    path = run_dir / "checkpoints" / (run_dir / "checkpoints" / name).read_text().strip()
    found: dict[str, torch.Tensor] = {}
    for file in path.glob(files):
        found |= load_file(file)
    assert found
    return found


def progress(run_dir: Path) -> dict[str, Any]:
    """What else the last checkpoint says of how far the run is."""
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    content = json.loads((run_dir / "checkpoints" / latest / "checkpoint.json").read_text())
    return {key: content[key] for key in _PROGRESS}


def files(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))


def assert_same_run(run_dir: Path, other: Path) -> None:
    """Every bit that a run leaves, but for times, and nothing besides."""
    assert rows(run_dir) == rows(other)
    assert files(run_dir) == files(other)
    for path in other.glob("*.csv"):
        if path.name != "metrics.csv":
            assert (run_dir / path.name).read_bytes() == path.read_bytes(), path.name
    ours, theirs = (json.loads((one / "summary.json").read_text()) for one in (run_dir, other))
    assert ours["loss"] == theirs["loss"]
    assert ours["validation"] == theirs["validation"]
    assert progress(run_dir) == progress(other)
    for name in ("latest", "best"):
        for kind in ("stage-*.safetensors", "random.safetensors"):
            assert_same_tensors(state(run_dir, name, kind), state(other, name, kind))


def assert_same_tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], within: float = 0.0
) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within)


# --- samples


class Layout(NamedTuple):
    """Of so many ranks.

    Attributes:
        words: of the command line.
        readers: for each part of a batch the ranks that see its samples.
        microbatches: in which they see them.
    """

    ranks: int
    words: str
    readers: Sequence[Sequence[int]]
    microbatches: int


def seen(folder: Path, life: int, layout: Layout) -> list[list[int]]:
    """The samples that went into each step of a life; a step in which it was killed is left out."""
    parts = []
    for ranks in layout.readers:
        of_ranks = [_steps(folder / f"seen-{life:02d}-{rank}", layout) for rank in ranks]
        part = min(of_ranks, key=len)
        assert all(steps[: len(part)] == part for steps in of_ranks)
        parts.append(part)
    return [sorted(chain(*step)) for step in zip(*parts, strict=False)]


def _steps(file: Path, layout: Layout) -> list[list[int]]:
    lines = file.read_text().splitlines() if file.exists() else []
    passes = [[int(word) for word in line.split()] for line in lines]
    count = layout.microbatches
    starts = range(0, len(passes) - count + 1, count)
    return [[*chain(*passes[start : start + count])] for start in starts]


def seen_by_step(folder: Path, lives: Sequence[tuple[Layout, int | None]]) -> list[list[int]]:
    """The samples of each step of a run; those of a step that was made again are the same.

    Args:
        lives: the layout of each, and the step after which it went on; None if it did not come so
            far.
    """
    found: dict[int, list[int]] = {}
    for life, (layout, before) in enumerate(lives):
        steps = seen(folder, life, layout)
        assert before is not None or not steps
        for number, samples in enumerate(steps, (before or 0) + 1):
            assert found.setdefault(number, samples) == samples, f"{life=}, {number=}"
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[number] for number in sorted(found)]


# --- a network that gets images whose third channel is the number of the sample

(MEAN,), (STD,) = Normalisation().mean, Normalisation().std

SEEN = "SPATIALDL_SOAK_SEEN"
"""In the environment: where a rank writes them, but for its number."""


class Seen(nn.Module):
    """Hands images on. The third channel of each is its number everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta and SEEN in os.environ:
            tile = x.to_local() if isinstance(x, SpatialTensor) else x
            numbers = ((tile[:, 2].detach() * STD + MEAN) * 255).flatten(1)
            assert (numbers.amax(1) - numbers.amin(1) < 0.1).all(), "a tile of several samples"
            found = numbers.mean(1).round().int().tolist()
            os.write(_file(), f"{' '.join(map(str, found))}\n".encode())
        return x


@functools.cache
def _file() -> int:
    info = launched()
    path = f"{os.environ[SEEN]}-{info.rank if info else 0}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def network(num_classes: int = 3, in_channels: int = 3) -> nn.Sequential:
    """BatchNorm, dropout, a stride, widths that divide by nothing; and what writes samples down."""
    return nn.Sequential(Seen(), *networks.network(num_classes, in_channels))
