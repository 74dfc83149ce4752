"""Where Slurm has four idle nodes these tests run, elsewhere they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.cluster.slurm import SP_PP, SRUN, TRAIN, answer, resume_drained, run, until
from tests.composing import composed
from tests.training.checkpoints.runs import losses

NODES = 4
UP = ("idle", "mixed", "allocated", "completing")


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("no Slurm on the path: make test-cluster starts one")
    asked = ["sinfo", "-h", "-N", "-o", "%T"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    up = [state for state in told.stdout.split() if state in UP]
    if len(up) < NODES:
        said = (told.stdout + told.stderr).split()
        pytest.skip(f"these tests take {NODES} nodes, sinfo says {' '.join(said)}")


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory) -> Callable[..., list[float]]:
    """The losses of a run in this process, by its words; those of nodes are to equal them."""

    @cache
    def of(*words: str) -> list[float]:
        run_dir = tmp_path_factory.mktemp("alone")
        Trainer(composed("train", *words), SingleProcess()).fit(run_dir)
        return losses(run_dir)

    return of


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Callable[[int], list[float]]:
    """The losses of so many steps on three nodes that nothing stops, to the last bit."""

    @cache
    def of(steps: int) -> list[float]:
        cwd = tmp_path_factory.mktemp("uninterrupted")
        words = [*SP_PP, f"trainer.max_steps={steps}", "hydra.run.dir=run"]
        done = run([*SRUN, "-N3", "-n3", *TRAIN, *words], cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(cwd / "run")

    return of


@pytest.fixture(scope="session")
def nodectl() -> str:
    found = shutil.which("nodectl")
    if found is None:
        pytest.skip("nodectl, which enters nodes and makes faults, is not here")
    return found


@pytest.fixture
def assert_gone(nodectl, tmp_path) -> Callable[..., None]:
    """That no process on nodes has a word among its arguments, in 5 s at the latest."""

    def check(nodes: list[str], word: str, patience_s: float = 5.0) -> None:
        def left() -> list[str]:
            shown = [run([nodectl, "exec", node, "ps", "-eo", "args"], tmp_path) for node in nodes]
            assert all("slurmd" in one.stdout for one in shown), shown
            return [line for one in shown for line in one.stdout.splitlines() if word in line]

        until(lambda: not left(), f"{word}: processes are still there", patience_s)

    return check


@pytest.fixture
def lose(nodectl) -> Iterator[Callable[[str, str, str], None]]:
    """Take a node away; afterwards it comes back."""
    lost = []

    def take(node: str, fault: str, remedy: str) -> None:
        lost.append((remedy, node))
        subprocess.run([nodectl, fault, node], check=True)

    yield take
    for remedy, node in lost:
        subprocess.run([nodectl, remedy, node], check=True)
        until(partial(_is_idle, node), f"{node} does not come back")
    resume_drained()


def _is_idle(node: str) -> bool:
    # Slurm itself asks a node that was down only now and then
    subprocess.run(
        ["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False
    )
    return answer("sinfo", "-h", "-N", "-n", node, "-o", "%T") == "idle"
