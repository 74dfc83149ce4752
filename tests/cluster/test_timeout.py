"""`comm.timeout`: ranks and nodes that hang, or are cut off, while others wait for them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cluster.slurm import SRUN, TRAIN, Job, run, until
from tests.comm.running import FOR_EVER, with_failing

TIMEOUT = "comm.timeout=6"
SP_PP = [*FOR_EVER, "parallel=sp+pp", "parallel.microbatches=2", TIMEOUT, "hydra.run.dir=run"]
THREE = ["-N3", "-n3"]
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
    blame = rf"nothing was heard of rank {lost} \(process \d+ on {nodes[lost]}\), stopped, dead, "
    assert len(re.findall(blame, said)) == 1, said


def assert_nothing_is_left(nodectl: str, nodes: list[str], cwd: Path) -> None:
    def left() -> list[str]:
        shown = [run([nodectl, "exec", node, "ps", "-eo", "args"], cwd) for node in nodes]
        assert all("slurmd" in one.stdout for one in shown), shown
        return [line for one in shown for line in one.stdout.splitlines() if TIMEOUT in line]

    until(lambda: not left(), "processes of the job are still there")


def test_a_rank_that_stops_is_named_and_the_job_ends(nodectl, tmp_path):
    done = run([*SRUN, "-w", "node[1-3]", "-n3", *TRAIN, *SP_PP, *with_failing("stops")], tmp_path)
    assert done.returncode != 0
    nodes = ["node1", "node2", "node3"]
    assert_told(done.stdout + done.stderr, nodes, lost=1)
    assert_nothing_is_left(nodectl, nodes, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize(("fault", "remedy"), [("freeze", "thaw"), ("cut", "heal")])
def test_a_rank_on_a_node_that_is_lost_is_named(fault, remedy, lost, lose, nodectl, tmp_path):
    each = shlex.join([*SRUN, *TRAIN, *SP_PP])
    with Job(tmp_path, *THREE, "--exclusive", "--no-requeue", "--wrap", each) as job:
        job.says("step 1 of")
        nodes = job.nodes()
        lose(nodes[lost], fault, remedy)
        job.says("The job ends.")
        until(job.is_over, "the job does not end")
        assert job.told("JobState") in ("FAILED", "NODE_FAIL"), job.said()
        assert_told(job.said(), nodes, lost)
    if fault == "freeze":
        run([nodectl, remedy, nodes[lost]], tmp_path)
    # who is cut off has waited for the others, and ended by itself
    assert_nothing_is_left(nodectl, nodes, tmp_path)
