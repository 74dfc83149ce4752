"""What is to be said, and left, of a job of which a rank hangs."""

from __future__ import annotations

import re

from tests.comm.running import FOR_EVER

TIMEOUT = "comm.timeout=8"
SP_PP = [*FOR_EVER, "parallel=sp+pp", "parallel.microbatches=2", TIMEOUT, "hydra.run.dir=run"]
WAITS = (
    r"rank (\d) on (\w+), step \d+.*: waits for \d+ s in (?:.*: )?"
    r"(exchange|hand-over|all-reduce)\b.* with ranks? ([\d, ]+)"
)


def assert_told(said: str, nodes: list[str], lost: int) -> None:
    """All others say with their names what they wait for, and one blames the right one."""
    told = {int(rank): (node, peers) for rank, node, _, peers in re.findall(WAITS, said)}
    others = [rank for rank in range(len(nodes)) if rank != lost]
    assert [told[rank][0] for rank in others] == [nodes[rank] for rank in others], said
    assert any(str(lost) in told[rank][1] for rank in others), said
    assert f"longer than {TIMEOUT}" in said
    blame = rf"no report from rank {lost} \(process \d+ on {nodes[lost]}\), stopped, dead, "
    assert len(re.findall(blame, said)) == 1, said
