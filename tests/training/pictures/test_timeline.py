from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.trace import Span
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.simulate import Action, describe
from spatialdl.training.pictures.timeline import StepTimeline, simulated, write_trace

PLACEMENT = Placement(2, ((2, 1), (1, 1)), mirrored=True)
TRAIN = make_schedule("mast", PLACEMENT, 2).train


def recorded(placement=PLACEMENT, train=TRAIN):
    """As if every rank did its actions one after the other; backwards wait for half their time."""
    ranks = []
    for rank in range(placement.world_size):
        held = {(p.copy, p.stage) for p in placement.positions(rank)}
        spans, now = [Span("data", "wait", 0.0, 0.5)], 0.5
        for action in (a for actions in train for a in actions if (a.copy, a.stage) in held):
            seconds = 1.0 if action.kind == "forward" else 4.0
            if action.kind == "backward":
                spans.append(Span("hand-over", "backward", now, now + 2))
            spans.append(Span("compute", describe(action), now, now + seconds, action))
            now += seconds
        spans.append(Span("compute", "optimizer", now, now + 0.5))
        ranks.append(spans)
    return ranks


def test_a_trace_has_a_track_for_every_rank_and_all_spans_in_microseconds(tmp_path):
    ranks = recorded()
    write_trace(tmp_path / "trace.json", ranks)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {rank: f"rank {rank}" for rank in range(6)}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, ranks))
    last = [event for event in spans if event["tid"] == 5 and event["cat"] == "compute"]
    assert last[0]["dur"] == 1e6
    assert last[0]["args"] == {"kind": "forward", "stage": 1, "microbatch": 0, "copy": 0}


def test_the_simulation_does_the_same_with_the_costs_that_were_measured():
    rows = simulated(recorded(), PLACEMENT, TRAIN)
    assert len(rows) == 6
    for rank, row in enumerate(rows):
        held = {(p.copy, p.stage) for p in PLACEMENT.positions(rank)}
        assert {(s.detail.copy, s.detail.stage) for s in row} == held
        assert [s.end - s.start for s in row] == pytest.approx(
            [1.0 if s.detail.kind == "forward" else 2.0 for s in row]
        )
        assert all(a.end <= b.start for a, b in pairwise(row))
    # ranks of a grid begin together: rank 1 holds the first stage of both copies
    starts = [{span.detail: span.start for span in row} for row in rows]
    for action in starts[1].keys() & starts[2].keys():
        assert starts[1][action] == starts[2][action]


def test_micro_batches_that_were_left_out_are_left_out_of_the_simulation():
    placement = Placement(1, ((1, 1),) * 2)
    train = make_schedule("1f1b", placement, 3).train
    ranks = [
        [span for span in spans if not (isinstance(span.detail, Action) and span.detail[2] == 2)]
        for spans in recorded(placement, train)
    ]
    assert [len(row) for row in simulated(ranks, placement, train)] == [4, 4]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    placement = Placement(1, ((1, 1),))
    train = make_schedule("gpipe", placement, 1).train
    timeline = StepTimeline(
        SingleProcess(), torch.device("cpu"), placement, train, tmp_path / "gone"
    )
    timeline.step_done(last=True)
    assert "cannot write the trace: " in caplog.text
    timeline.step_done(last=True)
    assert len(caplog.messages) == 1
