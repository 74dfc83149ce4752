from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from spatialdl.models import resnet18, wide_view
from spatialdl.streaming.memory import Memory
from spatialdl.streaming.store import DiskStore
from spatialdl.training.console.progress import TERMINAL
from spatialdl.training.virtual_tiles import (
    StepBar,
    check_room,
    choose_virtual_tiles,
)


def compose(*words: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base=None):
        return hydra_compose("train", list(words))


def parallel(*words: str) -> DictConfig:
    return compose("parallel.stream=auto", *words).parallel


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


def test_named_tiles_stay():
    settings = compose("parallel.stream=[3,2]").parallel
    choose_virtual_tiles(settings, resnet18(), (1, 3, 64, 64), torch.float32, None)
    assert list(settings.stream) == [3, 2]


class _Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.mean())


@pytest.mark.parametrize(
    ("limit", "model", "message"),
    [
        (None, wide_view(), "as few virtual tiles as fit into trainer.memory_limit_gb: set it"),
        (1e-6, wide_view(), r"trainer.memory_limit_gb=1e-06 is too small for images of 512x512"),
        (1.0, _Reads(), "what _Reads takes cannot be found out without data: name the tiles"),
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
    with pytest.raises(ValueError, match=r"about [0-9]+ GB of activations would wait in .* free"):
        room(tmp_path, 300_000)


def test_without_a_limit_nothing_waits_on_a_disk():
    check_room(Memory(), resnet18(), (1, 3, 300_000, 300_000), parts=1, ranks=1, recompute=False)


def test_a_bar_counts_the_operations_of_a_step(monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")
    memory = Memory()
    bar = StepBar(memory, is_told=True)
    for step in (1, 2):
        with bar.over(step), memory.watch():
            torch.ones(3).add(1).sum()
        assert memory.told is None
        assert bar._operations == 3


def test_other_ranks_and_runs_without_virtual_tiles_have_no_bar(monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")
    memory = Memory()
    for bar in (StepBar(memory, is_told=False), StepBar(None, is_told=True)):
        with bar.over(1):
            assert memory.told is None


def test_settings_of_virtual_tiles_are_left_alone_without_any():
    config = OmegaConf.create({"stream": None})
    choose_virtual_tiles(config, wide_view(), (1, 3, 64, 64), torch.float32, None)
    assert config.stream is None
