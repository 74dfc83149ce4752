"""Callbacks as users write them."""

from __future__ import annotations

import json

import spatialdl
from spatialdl.training.callbacks import RunState


class Recorder(spatialdl.Callback):
    """Writes its calls to one file per rank."""

    def __init__(self, stop_at: int | None = None, stopping_rank: int = 0) -> None:
        self.stop_at, self.stopping_rank = stop_at, stopping_rank
        self.average, self.calls = 0.0, []

    def _note(self, name: str, run: RunState) -> None:
        self.calls.append([name, run.step, run.loss, run.metrics.get("loss")])
        path = run.run_dir / f"calls-{run.rank}.json"
        path.write_text(json.dumps({"calls": self.calls, "average": self.average}))

    def on_fit_start(self, run: RunState) -> None:
        assert sum(p.numel() for one in run.stages.values() for p in one.parameters()) > 0
        self._note("fit_start", run)

    def on_step_end(self, run: RunState) -> None:
        self.average = 0.5 * self.average + 0.5 * run.loss
        self._note("step_end", run)
        if run.step == self.stop_at and run.rank == self.stopping_rank:
            run.stop("as was asked for")

    def on_validation_end(self, run: RunState) -> None:
        self._note("validation_end", run)

    def on_checkpoint(self, run: RunState) -> None:
        self._note("checkpoint", run)

    def on_fit_end(self, run: RunState) -> None:
        self._note("fit_end", run)

    def state_dict(self) -> dict:
        return {"average": self.average}

    def load_state_dict(self, state: dict) -> None:
        self.average = state["average"]


class Failing(spatialdl.Callback):
    def on_step_end(self, run: RunState) -> None:
        if run.rank == run.world_size - 1:
            raise OSError("no room for pictures")


STATES = {"set": {"of": {1, 2}}, "key": {1: 2}, "tuple": {"a": (1, 2)}, "bad": {"a": float("nan")}}
"""States that would come back otherwise, or not at all."""


class KeepsOdd(spatialdl.Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def state_dict(self) -> dict:
        return STATES[self.kind]
