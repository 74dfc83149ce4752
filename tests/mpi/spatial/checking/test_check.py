"""What the checking command prints on ranks; how it is started, tests/test_check.py shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spatialdl import check as command
from spatialdl.comm.communicator import Communicator
from tests.spatial.checking import user_networks
from tests.spatial.checking.user_networks import line_of

NETWORKS = "tests.spatial.checking.user_networks"
FILE = Path(user_networks.__file__)

pytestmark = pytest.mark.world(4)


@pytest.fixture
def check(world: Communicator, monkeypatch, capfd, tmp_path):
    """Runs the command on these ranks; its exit code and what rank 0 prints."""
    monkeypatch.setattr(command, "install_abort_hook", lambda: None)
    monkeypatch.setattr(command, "end_with_launcher", lambda: None)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check", *words])
        with pytest.raises(SystemExit) as stop:
            command.main()
        said = world.allgather(capfd.readouterr().out)
        assert not any(said[1:])
        assert world.allgather(stop.value.code) == [stop.value.code] * world.size
        return stop.value.code, said[0]

    return run


def test_an_exact_network(check):
    code, said = check(f"{NETWORKS}.Exact", "--size", "21x18", "--grid", "1x4")
    lines = said.splitlines()
    title = f"{NETWORKS}.Exact: images 2x3x21x18, float64, training, on 1x4 ranks"
    assert (code, lines[0], lines[-1]) == (0, title, "exact")
    rows = [line.split() for line in lines if line.endswith("  exact")]
    assert [row[:2] for row in rows] == [
        *(["F.conv2d", "2"], ["F.batch_norm", "1"], ["F.relu", "1"], ["F.dropout", "1"])
    ]
    assert "equal to a single process: outputs, loss, 7 gradients and 3 buffers" in lines


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (
            "spatialdl.models.unet3d in_channels=3 width=2 depth=2 --size 9x6x7 --grid 2x1x2",
            "images 2x3x9x6x7, float64, training, on 2x1x2 ranks",
        ),
        (f"{NETWORKS}.ViT width=8 --size 16x16 --grid 2x2", "images 2x3x16x16, float64"),
    ],
)
def test_volumes_and_tokens_are_compared_as_images_are(words, title, check):
    code, said = check(*words.split())
    assert (code, said.splitlines()[-1]) == (0, "exact")
    assert title in said


def test_refused_operations_are_named_with_their_lines(check):
    code, said = check(f"{FILE}:Refused", "--size", "13x10", "--grid", "4x1")
    assert code == 1
    cumsum, values = line_of("torch.cumsum(x"), line_of("svdvals")
    table = said[: said.index("refused: ")].splitlines()
    assert any(
        line.startswith("torch.cumsum") and line.endswith(f"refused {cumsum}") for line in table
    ), said
    assert any(line.endswith(f"refused {values}") for line in table)
    assert f"refused: torch.cumsum at {cumsum} in the network (Refused)\n    cumsum is not" in said
    assert "with rejected operations on the gathered image" in said
    assert said.splitlines()[-1] == "not exact"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "InPlace --size 13x10 --grid 4x1",
            (f"refused {line_of('cumsum_')}", "not compared: the rejected operation aborted"),
        ),
        ("chain --size 13x18 --grid 1x4", (" in 2 (AvgPool1d)\n",)),
        (
            "Wrong --size 13x10 --grid 2x2 --eval --dtype float32",
            ("float32, evaluation, on 2x2", "NOT EQUAL to a single", "output: off by up to "),
        ),
    ],
)
def test_what_is_not_exact_is_told(words, said, check):
    name, *more = words.split()
    code, found = check(f"{NETWORKS}.{name}", *more)
    assert (code, found.splitlines()[-1], found.count("not exact")) == (1, "not exact", 1)
    assert all(one in found for one in said), found


def test_the_way_out_of_a_vision_transformer_is_tried_and_named(check):
    """Arguments of the function are given with it."""
    words = ("width=8", "depth=2", "--size", "16x16", "--grid", "2x2")
    code, said = check(f"{NETWORKS}.SortedViT", *words)
    assert code == 1
    line = said.splitlines()[-2]
    assert "flip is not supported" in said
    assert line.startswith('workaround: spatialdl.gather_before(model, "patch_embed.norm"), or')
    assert line.endswith("tested, all results equal a single process")


@pytest.mark.parametrize(("name", "answer"), [("Exact", "exact"), ("Wrong", "not exact")])
def test_the_command_that_started_the_ranks_hears_the_result(name, answer, check, world, tmp_path):
    file = Path(world.allgather(str(tmp_path / "answer"))[0])
    words = ("--size", "13x10", "--grid", "2x2", "--answer", str(file))
    code, _ = check(f"{NETWORKS}.{name}", *words)
    assert (code, file.read_text()) == (0, answer)
