"""`comm.timeout`: ranks and nodes that hang, or are cut off, while others wait for them."""

from __future__ import annotations

import shlex

import pytest

from tests.cluster.hanging import SP_PP, TIMEOUT, assert_told
from tests.cluster.slurm import SRUN, TRAIN, Job, run, until
from tests.comm.running import with_failing

NODES = ["node1", "node2", "node3"]


def test_a_rank_that_stops_is_named_and_the_job_ends(assert_gone, tmp_path):
    done = run(
        [*SRUN, "-w", ",".join(NODES), "-n3", *TRAIN, *SP_PP, *with_failing("stops")], tmp_path
    )
    assert done.returncode != 0
    assert_told(done.stdout + done.stderr, NODES, lost=1)
    assert_gone(NODES, TIMEOUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize(("fault", "remedy"), [("freeze", "thaw"), ("cut", "heal")])
def test_a_rank_on_a_node_that_is_lost_is_named(
    fault, remedy, lost, lose, assert_gone, nodectl, tmp_path
):
    each = shlex.join([*SRUN, *TRAIN, *SP_PP])
    with Job(tmp_path, "-N3", "-n3", "--exclusive", "--no-requeue", "--wrap", each) as job:
        job.says("step 1 of")
        nodes = job.nodes()
        lose(nodes[lost], fault, remedy)
        job.says("Aborting the job.")
        until(job.is_over, "the job does not end")
        assert job.told("JobState") in ("FAILED", "NODE_FAIL"), job.said()
        assert_told(job.said(), nodes, lost)
    if fault == "freeze":
        run([nodectl, remedy, nodes[lost]], tmp_path)
    # who is cut off has waited for the others, and ended by itself
    assert_gone(nodes, TIMEOUT, patience_s=60)
