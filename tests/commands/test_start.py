"""How commands start; whole starts are in test_train.py and test_predict.py."""

from __future__ import annotations

import pytest
import torch
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from spatialdl.comm.launch import LaunchInfo
from spatialdl.commands.start import (
    check_command_line,
    choose_device,
    composed_for,
    has_run_dir_overrides,
    without_hydra,
)


@pytest.mark.parametrize(
    ("shared", "gpus", "chosen"),
    [(1, 4, [0, 1, 2, 3]), (2, 2, [0, 0, 1, 1]), (2, 4, [0, 0, 1, 1]), (1, 1, [0, 0, 0, 0])],
)
def test_ranks_of_a_machine_take_their_gpus_in_order(shared, gpus, chosen, monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    config = OmegaConf.create({"device": "auto", "comm": {"ranks_per_device": shared}})
    for local_rank in range(4):
        choose_device(config, LaunchInfo(local_rank, 4, local_rank, "mpiexec"))
    assert taken == chosen


def test_more_ranks_than_devices_are_refused(monkeypatch):
    """They shared devices silently: half as fast, and NCCL refused them later."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    config = OmegaConf.create({"device": "auto", "comm": {"ranks_per_device": 1}})
    with pytest.raises(ValueError, match=r"at most 2 ranks .* comm\.ranks_per_device=2"):
        choose_device(config, LaunchInfo(2, 3, 2, "mpiexec"))


def test_a_gpu_is_shared_by_one_rank_at_least():
    config = OmegaConf.create({"device": "cpu", "comm": {"ranks_per_device": 0}})
    with pytest.raises(ValueError, match=r"ranks_per_device=0 must be at least 1"):
        choose_device(config, LaunchInfo(0, 1, 0, "mpiexec"))


def flags(*words: str):
    return get_args_parser().parse_args(list(words))


def test_each_command_has_its_own_words_and_configuration():
    check_command_line(flags("slides=a.svs", "parallel=sp"), "predict")
    with pytest.raises(ValueError, match="slides is unknown"):
        check_command_line(flags("slides=a.svs"), "train")
    config = without_hydra(composed_for(flags("slides=a.svs", "parallel=sp"), "predict"))
    assert (config.slides, config.parallel.grid) == ("a.svs", [2, 1])
    assert "hydra" not in config
    assert has_run_dir_overrides(flags("hydra.output_subdir=null"))
    assert not has_run_dir_overrides(flags("slides=a.svs"))
