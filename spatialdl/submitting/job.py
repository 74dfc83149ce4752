"""Inside a job: ``python -m spatialdl.submitting.job`` starts the ranks of its run, and afterwards
puts the job back into the queue if time ran out.

This is the job's script, no rank: Slurm tells the ranks of the limit, by SIGUSR1, and they leave a
checkpoint and word of the signal in the run directory.
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
    """Run, as the command line of the script says; the exit code of the job."""
    options = _parser().parse_args(arguments)
    run_dir, restarts = options.run_dir, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    words = list(options.words)
    if restarts and complete(run_dir / FOLDER):
        words.append(f"ckpt_path={LATEST}")
    command, environment = ranks_command(options.ranks, "spatialdl.train", words)
    environment.setdefault("SLURM_DISTRIBUTION", "block")  # ranks that talk most share a node
    signal.signal(signal.SIGUSR1, _leave_to_ranks)
    _say(f"start {restarts + 1} of the run in {run_dir}")
    before = endings(run_dir)
    code = subprocess.call(command, env=environment)
    if code:
        _wait_for_dead_node()
        return code if code > 0 else 128 - code
    if endings(run_dir) == before:  # srun ends with 0 where it could not start all ranks, too
        _say("srun says that all is well, but no run has ended: were its ranks started?")
        return 1
    marker = run_dir / MARKER
    stopped = json.loads(marker.read_text()) if marker.exists() else {}
    if stopped.get("signal") != "SIGUSR1":
        return 0
    reason = why_not_again(stopped, restarts, options.requeue)
    if reason:
        _say(f"stopped after step {stopped['step']}, and not queued again: {reason}")
        return 1
    _say(f"stopped after step {stopped['step']}, goes on when it is its turn again")
    return subprocess.call(["scontrol", "requeue", job_id(os.environ)])


def job_id(environment: Mapping[str, str]) -> str:
    """Of this job only: one of an array has the array's number, which means all of them."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def endings(run_dir: Path) -> list[tuple[str, int, int]]:
    """What a run leaves behind when it is over or stopped; it changes with every run that ends."""
    found = [run_dir / name for name in ("summary.json", MARKER)]
    return [
        (path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in found if path.exists()
    ]


def why_not_again(stopped: Mapping[str, object], restarts: int, most: int) -> str | None:
    """What is against queueing a job again that time ran out for; None: nothing.

    Args:
        stopped: what the ranks have left word of.
        restarts: how many times it was.
        most: how many times it may be.
    """
    if stopped["checkpoint"] is None:
        return "there is no checkpoint, it would begin anew (trainer.checkpoint.keep=0)"
    if restarts >= most:
        return f"launcher.requeue={most}; ckpt_path={LATEST} goes on"
    return None


def _leave_to_ranks(number: int, frame: FrameType | None) -> None:
    """``scancel --full`` tells the script, too, which would die of it before it can go on."""


def _wait_for_dead_node() -> None:
    """Do not end before Slurm knows of a dead node: it queues only jobs again that still run."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    if nodes == "1":
        return
    on_each = ["--overlap", "--mpi=none", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    try:
        asked = subprocess.run(
            ["srun", *on_each, "hostname"],
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
        answers = len(asked.stdout.split())
    except subprocess.TimeoutExpired:
        answers = 0
    if answers < int(nodes):
        _say(f"{answers} of {nodes} nodes answer: waiting for Slurm to queue the job again")
        time.sleep(_SLURM_NOTICES_S)


def _say(text: str) -> None:
    print(f"job {job_id(os.environ)} on {socket.gethostname()}: {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.submitting.job")
    parser.add_argument("--ranks", type=int, required=True, help="that the layout has")
    parser.add_argument("--requeue", type=int, required=True, help="so many times it may go on")
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="command line of the ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
