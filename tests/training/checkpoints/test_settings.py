from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from spatialdl.training.checkpoints.settings import check_settings, local_folder


def check(*overrides: str) -> None:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        check_settings(compose("train", list(overrides)).trainer)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("validate_every=0", "validate_every=0 must be at least 1 step, or null"),
        ("validate_every_epochs=null", "validate_every_epochs=None must be at least 1 epoch"),
        ("checkpoint.every_steps=0", "every_steps=0 must be at least 1 step, or null"),
        ("checkpoint.every_epochs=1.5", "every_epochs=1.5 must be at least 1 epoch, or null"),
        ("checkpoint.keep=-1", "keep=-1 must be at least 0 checkpoints"),
        ("checkpoint.keep=true", "keep=True must be"),
        ("early_stopping.patience=0", "patience=0 must be at least 1 validation"),
        ("early_stopping.min_delta=-1", "min_delta=-1 must be 0 or above"),
        ("early_stopping.min_delta=few", "min_delta=few must be 0 or above"),
        ("checkpoint.local=/nowhere", "local=/nowhere is not a folder"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(override, sentence):
    check()
    with pytest.raises(ValueError, match=sentence):
        check(f"trainer.{override}")


def test_the_local_folder_is_that_of_slurm_unless_said_otherwise(tmp_path):
    job = {"SLURM_JOB_ID": "7"}
    assert local_folder("auto", {"TMPDIR": str(tmp_path)}) is None
    assert local_folder("auto", job) is None
    assert local_folder("auto", {**job, "TMPDIR": str(tmp_path)}) == tmp_path
    assert local_folder("auto", {**job, "SLURM_TMPDIR": str(tmp_path), "TMPDIR": "/"}) == tmp_path
    assert local_folder("auto", {**job, "SLURM_TMPDIR": "/nowhere"}) is None
    assert local_folder(None, {**job, "TMPDIR": str(tmp_path)}) is None
    assert local_folder(str(tmp_path), {}) == tmp_path
