"""Training in this process, as tests do it that do not look at pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.training import run_directory
from spatialdl.training.report import page
from spatialdl.training.trainer import Trainer


def fit(trainer: Trainer, run_dir: Path) -> None:
    """The pictures of the loss take longer than small runs, and have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "draw", lambda *_: None)
        patch.setattr(page, "curves", lambda *_: "")
        trainer.fit(run_dir)
