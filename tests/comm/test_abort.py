"""What a process says of the error that ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm.abort import describe_error
from spatialdl.errors import NotFinite

ROOT = Path(__file__).resolve().parents[2]
LOST = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:4321. This is typically caused by another rank\nException raised from x.cpp"
)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_lost_connection_points_at_the_rank_that_left():
    assert describe_error(raised(RuntimeError(LOST))) == (
        "lost the connection to another rank, see its error or the launcher's "
        "(Connection closed by peer [127.0.0.1]:4321)"
    )


@pytest.mark.parametrize("error", [RuntimeError("oops"), TypeError("no"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error):
    said = describe_error(raised(error))
    assert said.startswith("Traceback")
    assert f"{__file__}" in said
    assert said.endswith(str(error))


def test_a_loss_that_is_no_number_and_hydras_long_lists_are_one_sentence(monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert describe_error(raised(NotFinite("the loss is nan"))) == "the loss is nan"
    error = ValueError("no such group\nConfig search path:\n\tprovider=main, path=pkg://conf")
    assert describe_error(error) == "no such group"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert describe_error(error) == "no such group"


HOOK = """
import logging, sys
from logging.handlers import MemoryHandler
from spatialdl.comm.abort import install_abort_hook
logging.getLogger().addHandler(MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
install_abort_hook()
logging.getLogger().warning("kept back")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said", "logged"),
    [
        ("ValueError('the grid is\\ntoo fine')", 1, "error: the grid is too fine\n", "kept back\n"),
        ("KeyboardInterrupt", 130, "", None),
    ],
)
def test_a_process_that_nobody_launched_ends_in_one_line(error, code, said, logged):
    done = subprocess.run(
        [sys.executable, "-c", HOOK.format(error=error)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr == said
    if logged is not None:
        assert done.stdout == logged
