"""What a training step may ask of the host, of copies and of the transport, at most.

A device without memory counts it, in a process of its own: see `device`. Where a bound is exceeded,
``python -m tests.host_waits --places 20`` has the lines that cause it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host_waits import estimate

ROOT = Path(__file__).parents[2]


class Bound(NamedTuple):
    """Of the second step of one of four ranks, on images of 1,024 x 1,024.

    Where the network is cut into stages, each of the rank with the most.
    """

    waits: int
    d2h: int
    h2d: int
    messages: int
    collectives: int
    launches: int


BOUNDS = {
    "ResNet-50/sp": Bound(175, 235, 235, 93, 144, 2089),
    "ResNet-50/dp": Bound(37, 35, 35, 0, 38, 851),
    "ResNet-50/sp, clipping": Bound(176, 236, 236, 93, 145, 2103),
    "ResNet-50/sp, fp16": Bound(175, 235, 235, 93, 145, 2316),
    "ResNet-50/sp, LARS": Bound(175, 235, 235, 93, 144, 2159),
    "ResNet-50/lp": Bound(3, 2, 2, 2, 1, 148),
    "ResNet-50/pp": Bound(9, 8, 8, 8, 1, 731),
    "ResNet-50/gems": Bound(29, 28, 28, 8, 25, 932),
    "U-Net/sp": Bound(92, 160, 160, 105, 57, 1053),
    "U-Net/dp": Bound(19, 17, 17, 0, 20, 334),
    "U-Net/lp": Bound(5, 4, 4, 4, 1, 83),
    "U-Net/pp": Bound(17, 16, 16, 16, 1, 385),
    "U-Net/gems": Bound(26, 25, 25, 12, 18, 418),
    "ConvNeXt-T/sp": Bound(72, 142, 142, 108, 36, 884),
    "ViT-S/16/sp": Bound(156, 154, 154, 108, 48, 1195),
}


QUICK = ("ResNet-50/sp",)
"""The others are left to the longer proof."""

STEPS = [pytest.param(step, marks=() if step in QUICK else pytest.mark.slow) for step in BOUNDS]


def run(*words: str) -> str:
    """The output of a Python of its own, from the root of the repository."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def counts(network: str, is_quick: bool) -> dict[str, dict[str, Any]]:
    """Of several bounds of a network, in one process: that takes most of the time."""
    ours = [step for step in BOUNDS if step.startswith(f"{network}/")]
    steps = [step for step in ours if (step in QUICK) == is_quick]
    found: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.host_waits", "--json", *steps))
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_step_stays_within_its_bounds(step):
    found = counts(step.rpartition("/")[0], step in QUICK)[step]
    above = {
        kind: f"{found[kind]} instead of {most}: {found['places'][kind][:5]}"
        for kind, most in BOUNDS[step]._asdict().items()
        if found[kind] > most
    }
    assert above == {}
    assert found["objects"] == 0, "nothing is pickled in a step"


COUNTED = """
import torch
import torch.nn.functional as F
from spatialdl.random import keyed
from tests.host_waits import device
from tests.host_waits.ledger import KINDS

device.install()
with device.counting() as ledger:
    pinned, plain = torch.ones(4, pin_memory=True), torch.ones(4)
    assert pinned.is_pinned() and not plain.is_pinned()
    x = plain.to("sim")
    def counted(what):
        ledger.is_on, before = True, ledger.totals()
        what()
        ledger.is_on, after = False, ledger.totals()
        return {kind: after[kind] - before[kind] for kind in KINDS if after[kind] > before[kind]}
    for what, expected in [
        (lambda: x.add_(1).relu(), {"launches": 2}),
        (lambda: x.view(2, 2).t()[1:], {}),
        (lambda: torch.empty_like(x), {}),
        (lambda: x.cpu(), {"waits": 1, "d2h": 1}),
        (lambda: x.tolist(), {"waits": 1, "d2h": 1}),
        (lambda: plain.to("sim"), {"waits": 1, "h2d": 1}),
        (lambda: torch.tensor(1.0, device="sim"), {"waits": 1, "h2d": 1}),
        (lambda: x.new_tensor([1.0]), {"waits": 1, "h2d": 1}),
        (lambda: pinned.to("sim", non_blocking=True), {"h2d": 1}),
        (lambda: plain.to("sim", non_blocking=True), {"waits": 1, "h2d": 1}),
        (lambda: pinned.copy_(x, non_blocking=True), {"d2h": 1}),
        (lambda: plain.copy_(x, non_blocking=True), {"waits": 1, "d2h": 1}),
        (lambda: x.sum().item(), {"waits": 1, "launches": 1}),
        (lambda: bool((x > 0).all()), {"waits": 1, "launches": 2}),
        (lambda: x[x > 0], {"waits": 1, "launches": 3}),
        (lambda: torch.cuda.current_stream().synchronize(), {"waits": 1}),
        (lambda: torch.cuda.Stream().record_event().synchronize(), {"waits": 1}),
        (lambda: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()), {}),
        (lambda: plain.sum().item(), {}),
    ]:
        assert counted(what) == expected, (counted(what), expected)
    try:
        x + plain
    except RuntimeError as error:
        assert "sim:0" in str(error), "tensors of two devices must not meet"
    with keyed(0, 0):
        x = torch.empty(4, 64, 128, 128, device="sim")
        mask = counted(lambda: F.dropout(x, 0.1))
assert mask.pop("launches") <= 29, "a mask of 4 million numbers takes few launches"
assert mask == {"h2d": 1}, "and no wait"
"""


def test_the_counter_sees_waits_copies_and_launches():
    run("-c", COUNTED)


def test_operations_copy_their_tables_once():
    """Random masks are told their places by a copy that nobody waits for."""
    found = json.loads(run("-m", "tests.host_waits.operations"))
    left = {
        f"{name}, {place}": count
        for name, places in found.items()
        for place, count in places.items()
        if not place.startswith("h2d: random/generator.py:")
    }
    assert len(found) > 25
    assert left == {}


def test_an_estimate_is_the_planners_time_with_waits_and_copies(monkeypatch):
    counted = {"waits": 100, "bytes": {"messages": 5e6, "collectives": 40e6}}
    copied = [estimate.copied_bytes(case, counted) for case in estimate.CASES]
    # sums, and halos as long as the edges
    assert copied == [0, 2 * (40e6 + 2 * 5e6), 2 * (40e6 + 4 * 5e6)]
    monkeypatch.setattr(estimate, "planned", lambda cluster, case: 0.01 * (1 + (case.ranks > 1)))
    alone, four, _ = estimate._rows("h100", counted)
    assert alone[3:] == ["10.0 ms"] * 3 + ["100%"]
    copies = 1e3 * 100e6 / estimate.PCIE
    before, now = (20 + copies + 1e3 * n * estimate.WAIT_S for n in (estimate.WAITS_BEFORE, 100))
    assert four[3:] == [f"{before:.1f} ms", f"{now:.1f} ms", "20.0 ms", "50%"]
