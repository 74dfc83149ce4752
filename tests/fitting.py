"""Training in this process, as tests do it that do not look at pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spatialdl.training import run_directory
from spatialdl.training.report import page
from spatialdl.training.trainer import Trainer


def fit(trainer: Trainer, run_dir: Path) -> None:
    """The pictures of the loss take longer than small runs, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "draw", lambda *_: None)
        patch.setattr(page, "curves", lambda *_: "")
        trainer.fit(run_dir)


def check_validations(
    ours: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]
) -> None:
    """Those of two runs have the same metrics, to 1e-10."""
    for one, other in zip(ours, plain, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, list):
                torch.testing.assert_close(one[key], value, rtol=0, atol=1e-10, equal_nan=True)
            else:
                assert one[key] == pytest.approx(value, abs=1e-10, nan_ok=True), key
