"""Job script: ``python -m spatialdl.cli.slurm_job`` starts the ranks of a run, and requeues the
job if it reached the time limit.

This process is not a rank: Slurm signals the time limit to the ranks by SIGUSR1, and they leave a
checkpoint and a record of the signal in the run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from spatialdl.comm.launch import ranks_command
from spatialdl.training.checkpoints.folder import FOLDER, LATEST, complete
from spatialdl.training.signals import MARKER

_SLURM_NOTICES_S = 900.0
_ANSWER_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; return its exit code."""
    options = _parser().parse_args(arguments)
    run_dir, restarts = options.run_dir, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    words = list(options.words)
    if restarts and complete(run_dir / FOLDER):
        words.append(f"ckpt_path={LATEST}")
    command, environment = ranks_command(options.ranks, "spatialdl.train", words)
    # ranks that communicate most share a node
    environment.setdefault("SLURM_DISTRIBUTION", "block")
    signal.signal(signal.SIGUSR1, _ignore)
    _print(f"start {restarts + 1} of the run in {run_dir}")
    before = end_markers(run_dir)
    code = subprocess.call(command, env=environment)
    if code:
        _wait_for_dead_node()
        return code if code > 0 else 128 - code
    if end_markers(run_dir) == before:  # srun exits with 0 even if it could not start all ranks
        _print("srun reports success, but no run has ended: check that its ranks started")
        return 1
    marker = run_dir / MARKER
    stopped = json.loads(marker.read_text()) if marker.exists() else {}
    if stopped.get("signal") != "SIGUSR1":
        return 0
    reason = requeue_obstacle(stopped, restarts, options.requeue)
    if reason:
        _print(f"stopped after step {stopped['step']}, not requeued: {reason}")
        return 1
    _print(f"stopped after step {stopped['step']}, requeued, resumes when Slurm restarts it")
    return subprocess.call(["scontrol", "requeue", job_id(os.environ)])


def job_id(environment: Mapping[str, str]) -> str:
    """Id of this job only; the id of an array would address all of its jobs."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def end_markers(run_dir: Path) -> list[tuple[str, int, int]]:
    """State of the files that a run writes when it ends or is stopped; changes with each end."""
    paths = [run_dir / name for name in ("summary.json", MARKER)]
    return [
        (path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.exists()
    ]


def requeue_obstacle(stopped: Mapping[str, object], restarts: int, most: int) -> str | None:
    """Why a job that reached its time limit is not requeued; None if it is.

    Args:
        stopped: the ranks' record of the signal.
        restarts: number of restarts so far.
        most: maximum number of restarts.
    """
    if stopped["checkpoint"] is None:
        return "there is no checkpoint, it would restart from scratch (trainer.checkpoint.keep=0)"
    if restarts >= most:
        return f"launcher.requeue={most} reached; resume with ckpt_path={LATEST}"
    return None


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: ``scancel --full`` sends it to the script too, which would die."""


def _wait_for_dead_node() -> None:
    """Wait until Slurm detects a dead node, because it requeues only jobs that still run."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    if nodes == "1":
        return
    on_each = ["--overlap", "--mpi=none", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    try:
        probe = subprocess.run(
            ["srun", *on_each, "hostname"],
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
        answers = len(probe.stdout.split())
    except subprocess.TimeoutExpired:
        answers = 0
    if answers < int(nodes):
        _print(f"{answers} of {nodes} nodes respond: waiting for Slurm to requeue the job")
        time.sleep(_SLURM_NOTICES_S)


def _print(text: str) -> None:
    print(f"job {job_id(os.environ)} on {socket.gethostname()}: {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.cli.slurm_job")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks of the layout")
    parser.add_argument("--requeue", type=int, required=True, help="maximum number of restarts")
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="command line of the ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
