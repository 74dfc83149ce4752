"""How commands start; whole starts are in test_train.py and test_predict.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from spatialdl.cli.start import (
    check_command_line,
    choose_device,
    composed_by_rank,
    composed_for,
    has_run_dir_overrides,
    without_hydra,
)
from spatialdl.comm.launch import LaunchInfo


def test_a_rank_of_a_sweep_knows_the_number_of_its_job(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    numbered = "# @package _global_\nseed: ${hydra:job.num}\n"
    (tmp_path / "experiment" / "numbered.yaml").write_text(numbered)
    words = ["--config-dir", str(tmp_path), "experiment=numbered", "hydra.job.num=3"]
    words += ["hydra.run.dir='x'", "hydra.output_subdir=null"]  # as the starting process adds
    monkeypatch.setattr(HydraConfig.instance(), "cfg", HydraConfig.instance().cfg)
    found = composed_by_rank(LaunchInfo(1, 2, 1, "mpiexec"), words, "train", pytest.fail)
    assert without_hydra(found[1]).seed == 3


@pytest.mark.parametrize(
    ("shared", "gpus", "chosen"),
    [
        *((1, 4, [0, 1, 2, 3]), (2, 2, [0, 0, 1, 1]), (2, 4, [0, 0, 1, 1]), (1, 1, [0, 0, 0, 0])),
        # they shared devices silently: half as fast, and NCCL refused them later
        (1, 2, r"at most 2 ranks .* comm\.ranks_per_device=2"),
        (0, 2, "ranks_per_device=0 must be at least 1"),
    ],
)
def test_ranks_of_a_machine_take_their_gpus_in_order(shared, gpus, chosen, monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    config = OmegaConf.create({"device": "auto", "comm": {"ranks_per_device": shared}})
    refused = isinstance(chosen, str)
    with pytest.raises(ValueError, match=chosen) if refused else nullcontext():
        for local_rank in range(4):
            choose_device(config, LaunchInfo(local_rank, 4, local_rank, "mpiexec"))
    assert refused or taken == chosen


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
