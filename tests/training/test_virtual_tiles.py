from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from spatialdl.comm.across import GivenUp
from spatialdl.models import resnet18, wide_view
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.streaming.store import DiskStore
from spatialdl.training import signals
from spatialdl.training.checks import check_config
from spatialdl.training.console.progress import TERMINAL
from spatialdl.training.trainer import Trainer
from spatialdl.training.virtual_tiles import (
    StepWatch,
    check_room,
    choose_virtual_tiles,
)
from tests import fitting
from tests.composing import composed
from tests.fitting import check_validations, summary
from tests.training.test_trainer import SMALL, TINY

STREAM = "parallel.stream=[2,2]"


@pytest.mark.parametrize(
    "words",
    [
        "trainer.memory_limit_gb=2 parallel.stream_to=/tmp",
        "parallel=sp+pp parallel.recompute=block trainer.clip_norm=1 trainer.ema=0.9",
        "parallel=gems trainer.accumulate=2",
        "task=segmentation model=unet",
    ],
)
def test_what_goes_with_virtual_tiles(words):
    assert check_config(composed("train", *f"{STREAM} {words}".split())).stream == (2, 2)


@pytest.mark.parametrize(
    "words", ["task.mixup=0.2", "task=survival task.loss=cox", "parallel.tensor=2"]
)
def test_what_does_not_go_with_virtual_tiles(words):
    *_, what = words.split()
    sentence = rf"^{what} does not support virtual tiles, parallel.stream=\[2, 2\]: set only one"
    with pytest.raises(ValueError, match=sentence):
        check_config(composed("train", *f"{STREAM} {words}".split()))


@pytest.mark.parametrize("words", ["parallel.stream_to=/tmp", "trainer.memory_limit_gb=2"])
def test_keys_of_virtual_tiles_are_of_no_use_without_any(words):
    with pytest.raises(ValueError, match=rf"^{words} has no effect without virtual tiles: set par"):
        check_config(composed("train", *words.split()))


def parallel(*words: str) -> DictConfig:
    return composed("train", "parallel.stream=auto", *words).parallel


def chosen(limit: object, *words: str, shape: tuple[int, ...] = (1, 3, 1024, 1024)) -> list[int]:
    settings = parallel(*words)
    choose_virtual_tiles(settings, resnet18(num_classes=2), shape, torch.float32, limit)
    return list(settings.stream)


def test_auto_takes_fewer_tiles_the_more_memory_there_is():
    rows = [chosen(limit) for limit in (0.05, 0.1, 0.2, 10)]
    counts = [one[0] * one[1] for one in rows]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2]
    assert rows[3] == [1, 1]
    # two ranks have half of the image each
    halves = chosen(0.05, "parallel=sp", "parallel.grid=[2,1]")
    assert counts[0] / 2 <= halves[0] * halves[1] < counts[0]


@pytest.mark.parametrize("stream", [[3, 2], None])
def test_named_tiles_stay_and_without_any_there_are_none(stream):
    settings = OmegaConf.create({"stream": stream})
    choose_virtual_tiles(settings, resnet18(), (1, 3, 64, 64), torch.float32, None)
    assert settings.stream == stream


class _Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.mean())


@pytest.mark.parametrize(
    ("limit", "model", "message"),
    [
        (None, wide_view(), "needs a memory limit: set trainer.memory_limit_gb"),
        (1e-6, wide_view(), r"trainer.memory_limit_gb=1e-06 is too small for images of 512x512"),
        (1.0, _Reads(), "the memory of _Reads cannot be computed without data: set the tiles"),
    ],
)
def test_auto_needs_a_limit_and_a_network_that_it_can_look_at(limit, model, message):
    with pytest.raises(ValueError, match=message):
        choose_virtual_tiles(parallel(), model, (1, 3, 512, 512), torch.float32, limit)


def room(tmp_path: Path, side: int) -> None:
    memory = Memory(10**9, DiskStore(tmp_path))
    check_room(memory, resnet18(), (1, 3, side, side), parts=1, ranks=1, recompute=False)


def test_a_disk_that_is_too_small_is_told_before_the_step(tmp_path):
    room(tmp_path, 512)
    with pytest.raises(ValueError, match=r"about [0-9]+ GB of activations would be off.* free"):
        room(tmp_path, 300_000)
    # without a limit nothing waits on a disk
    check_room(Memory(), resnet18(), (1, 3, 300_000, 300_000), parts=1, ranks=1, recompute=False)


def test_a_bar_counts_the_operations_of_a_step_on_one_rank(monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")
    memory = Memory()
    watch = StepWatch(memory, [], shows=True)
    for step in (1, 2):
        with watch.over(step), memory.watch():
            torch.ones(3).add(1).sum()
        assert memory.on_operation is None
        assert watch._operations == 3
    for other in (StepWatch(memory, [], shows=False), StepWatch(None, [], shows=True)):
        with other.over(1):
            assert memory.on_operation is None


def test_a_step_that_is_given_up_leaves_buffers_as_they_were():
    memory, norm, told = Memory(), nn.BatchNorm2d(2), []
    watch = StepWatch(memory, [norm], shows=False, stops=lambda: bool(told))
    before = {name: one.clone() for name, one in norm.named_buffers()}

    def step() -> None:
        with watch.over(1), memory.watch():
            norm(torch.rand(2, 2, 4, 4))
            told.append(True)
            norm(torch.rand(2, 2, 4, 4))

    with pytest.raises(GivenUp):
        step()
    assert memory.on_operation is None
    assert all(torch.equal(one, before[name]) for name, one in norm.named_buffers())


# --- whole runs

UNET = ("task=segmentation", "model=unet", "model.width=4", "model.depth=2")
KINDS = {
    "classification": [*SMALL, "data.image_size=[140,133]"],
    "segmentation": [*UNET, "data.image_size=[54,51]"],
}


def train(run_dir: Path, *words: str) -> Trainer:
    return fitting.train(run_dir, *TINY, "trainer.max_steps=2", "trainer.report=false", *words)


@pytest.mark.parametrize(
    ("task", "stream"),
    [("classification", "[2,2]"), ("segmentation", "[1,1]")],
)
def test_a_run_on_virtual_tiles_equals_the_one_without(task, stream, tmp_path):
    """Activations are offloaded to disk."""
    words = [*KINDS[task], "data/augment=pathology", "trainer.ema=0.5"]
    words += ["trainer.validate_every=1", "parallel.microbatches=2", "trainer.clip_norm=1"]
    plain = train(tmp_path / "plain", *words)
    limit = ["trainer.memory_limit_gb=0.0001", f"parallel.stream_to={tmp_path}"]
    ours = train(tmp_path / "ours", *words, f"parallel.stream={stream}", *limit)
    found, expected = summary(tmp_path / "ours"), summary(tmp_path / "plain")
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    assert len(found["validation"]) == len(expected["validation"]) == 2
    check_validations(found["validation"], expected["validation"])
    state = ours.parts.pipeline.state_dict()
    for name, value in plain.parts.pipeline.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
    store = ours.parts.pipeline.options.memory.store
    assert store.written > 1_000_000
    assert store.folder == tmp_path


def test_a_run_that_is_told_to_stop_gives_up_a_step_on_virtual_tiles(tmp_path, monkeypatch):
    """A step may outlast the grace period of a scheduler; it is discarded and repeated."""
    words = [*SMALL, "data.image_size=[32,32]", "parallel.stream=[2,2]"]
    monkeypatch.setattr(signals._Seen, "first", None)
    asked, stop_at = 0, -1

    def seen() -> bool:
        nonlocal asked
        asked += 1
        if asked == stop_at:
            signals._Seen.first = signal.SIGTERM
        return signals._Seen.first is not None

    with monkeypatch.context() as within:
        within.setattr(signals, "seen", seen)
        whole = train(tmp_path / "whole", *words)
        of_a_step = asked // whole.progress.step
        asked, stop_at = 0, of_a_step * 3 // 2  # in the midst of the second step
        stopped = train(tmp_path / "ours", *words)
    assert asked == stop_at  # it did not even end the operation
    assert 0 < stopped.progress.step < whole.progress.step
    assert stopped.progress.stopped is signal.SIGTERM
    monkeypatch.setattr(signals._Seen, "first", None)
    ours = train(tmp_path / "ours", *words, "ckpt_path=latest")
    assert summary(tmp_path / "ours")["loss"] == summary(tmp_path / "whole")["loss"]
    state = ours.parts.pipeline.state_dict()
    for name, value in whole.parts.pipeline.state_dict().items():
        assert torch.equal(state[name], value), name
