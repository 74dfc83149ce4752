"""How commands start; whole starts are in test_train.py and test_predict.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spatialdl.cli.prediction import Command
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


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        # they shared devices silently: half as fast, and NCCL refused them later
        (1, r"at most 2 ranks .* comm\.ranks_per_device=2"),
        (0, "ranks_per_device=0 must be at least 1"),
    ],
)
def test_more_ranks_than_devices_are_refused(shared, said, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    config = OmegaConf.create({"device": "auto", "comm": {"ranks_per_device": shared}})
    with pytest.raises(ValueError, match=said):
        choose_device(config, LaunchInfo(2, 3, 2, "mpiexec"))


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


def one_rank(config: DictConfig) -> SimpleNamespace:
    return SimpleNamespace(world_size=1)


def refusal(config: DictConfig) -> SimpleNamespace:
    raise ValueError("table=xml must be csv or parquet")


@pytest.fixture
def ended(tmp_path, monkeypatch, run_main):
    """The exit code of a command with such parts, and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(check: Callable, work: Callable, *words: str) -> tuple[int, str]:
        @hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="predict")
        def application(config: DictConfig) -> None:
            command.start(config)

        command = Command("predict", application, check, None, work, "error: see {run_dir}")
        return run_main(command.main, *words)

    return run


WORDS = ("ckpt_path=run", "hydra.run.dir=here")


def test_it_fails_where_the_work_did_not_succeed(ended, tmp_path):
    seen = []

    def work(config: DictConfig, run_dir: Path, world: object) -> bool:
        seen.append((str(config.ckpt_path), run_dir))
        return False

    code, errors = ended(one_rank, work, *WORDS)
    assert seen == [("run", tmp_path / "here")]
    assert code == 1
    assert f"error: see {tmp_path / 'here'}" in errors
    assert (tmp_path / "here" / "predict.log").is_file()


def test_a_mistake_is_one_line_and_nothing_is_done(ended):
    assert ended(refusal, pytest.fail, *WORDS) == (1, "error: table=xml must be csv or parquet\n")
    code, errors = ended(one_rank, pytest.fail, *WORDS, "tabel=csv")
    assert code == 1
    assert "tabel is unknown; nearest: table" in errors


def test_help_needs_no_configuration(ended):
    code, said = ended(pytest.fail, pytest.fail, "--help")
    assert code == 0
    assert "error" not in said.splitlines()[0]
