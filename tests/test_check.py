"""The command as users run it: a network of theirs in a folder of theirs, on ranks it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spatialdl import check as command
from spatialdl.comm.launch import mpiexec_command

NETWORKS = """\
import torch
from torch import nn


class Exact(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Conv2d(3, 4, 3, 2, 1)
        self.body = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return {"map": self.head(self.body(x))}


class Refused(Exact):
    def forward(self, x):
        x = self.body(x)
        x = torch.cumsum(x, 3)
        return self.head(x), torch.linalg.svdvals(x)


class InPlace(Exact):
    def forward(self, x):
        return self.head(self.body(x)).cumsum_(2)


class Noise(Exact):
    def forward(self, x):
        return self.body(x) * torch.rand(())


class Wrong(Exact):
    # what it does with the size of its tile depends on the rank
    def forward(self, x):
        tile = x.to_local() if hasattr(x, "to_local") else x
        return self.body(x) * tile.shape[2]


def named(in_channels):
    return nn.Conv2d(7, 2, 1)


def chain():
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(2), nn.AvgPool1d(3, 2), nn.Softmax(2))


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class ViT(nn.Module):
    # built and named as those of timm
    def __init__(self, width, depth=1):
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        self.cls_token = nn.Parameter(torch.ones(1, 1, width))
        layers = [
            nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True) for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x):
        x = self.patch_embed(x)
        return self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1))[:, 0]


class SortedViT(ViT):
    # takes its tokens in another order
    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat([x, self.cls_token.expand(len(x), -1, -1)], 1).flip(1)
        return self.blocks(x)[:, 0]


def number():
    return 3


def needs(width):
    return Exact()


thing = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("project")
    (made / "my_package").mkdir()
    (made / "my_package" / "__init__.py").write_text("")
    (made / "my_package" / "networks.py").write_text(NETWORKS)
    return made


def check(
    folder: Path, *arguments: str, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, sys.executable, "-m", "spatialdl.check", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def line_of(text: str) -> int:
    """The line of the networks' file with `text` in it."""
    return next(n for n, line in enumerate(NETWORKS.split("\n"), 1) if text in line)


@pytest.mark.slow
def test_an_exact_network(folder: Path) -> None:
    done = check(folder, "my_package.networks.Exact", "--size", "21x18", "--grid", "1x2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "my_package.networks.Exact: images 2x3x21x18, float64, training, on 1x2 ranks"
    )
    rows = [line.split() for line in lines if line.endswith("  exact")]
    assert [row[:2] for row in rows] == [
        ["F.conv2d", "2"],
        ["F.batch_norm", "1"],
        ["F.relu", "1"],
        ["F.dropout", "1"],
    ]
    assert "equal to a single process: outputs, loss, 7 gradients and 3 buffers" in lines
    assert lines[-1] == "exact"


def test_volumes_are_compared_as_images_are(folder: Path) -> None:
    words = ("spatialdl.models.unet3d", "in_channels=3", "width=2", "depth=2")
    done = check(folder, *words, "--size", "9x6x7", "--grid", "2x1x1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "images 2x3x9x6x7, float64, training, on 2x1x1 ranks" in lines[0]
    assert lines[-1] == "exact"


def test_refused_operations_are_named_with_their_lines(folder: Path) -> None:
    done = check(folder, "my_package/networks.py:Refused", "--size", "13x10", "--grid", "2x1")
    assert done.returncode == 1
    cumsum = f"my_package/networks.py:{line_of('cumsum(x')}"
    values = f"my_package/networks.py:{line_of('svdvals')}"
    said = done.stdout.replace(f"{folder}/", "")
    table = said[: said.index("refused: ")]
    assert any(
        line.startswith("torch.cumsum") and line.endswith(f"refused {cumsum}")
        for line in table.splitlines()
    ), said
    assert f"refused {values}" in table
    assert f"refused: torch.cumsum at {cumsum} in the network (Refused)\n    cumsum is not" in said
    assert "with rejected operations on the gathered image" in said
    assert said.splitlines()[-1] == "not exact"


@pytest.mark.slow
def test_a_vision_transformer_with_a_class_token_is_exact(folder: Path) -> None:
    words = ("my_package.networks.ViT", "width=8", "--size", "16x12", "--grid", "2x1")
    done = check(folder, *words)
    assert done.returncode == 0
    assert "exact" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_way_out_of_a_vision_transformer_is_tried_and_named(folder: Path) -> None:
    """Arguments of the function are given with it."""
    words = (
        "my_package.networks.SortedViT",
        "width=8",
        "depth=2",
        "--size",
        "16x12",
        "--grid",
        "2x1",
    )
    done = check(folder, *words)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "flip is not supported" in done.stdout
    assert lines[-2].startswith(
        'workaround: spatialdl.gather_before(model, "patch_embed.norm"), or'
    )
    assert lines[-2].endswith("tested, all results equal a single process")


@pytest.mark.slow
def test_a_refusal_that_cannot_be_gathered_ends_the_run(folder: Path) -> None:
    done = check(folder, "my_package.networks.InPlace", "--size", "13x10", "--grid", "2x1")
    assert done.returncode == 1
    assert f"refused {folder}/my_package/networks.py:{line_of('cumsum_')}" in done.stdout
    assert "not compared: the rejected operation aborted the step" in done.stdout


@pytest.mark.slow
def test_a_refusal_in_a_chain_of_modules_names_the_module(folder: Path) -> None:
    done = check(folder, "my_package.networks.chain", "--size", "13x18", "--grid", "1x2")
    assert done.returncode == 1
    assert "refused: F.avg_pool1d in 2 (AvgPool1d)" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("no_package.build", (), "cannot import no_package.build: No module named"),
        ("my_package.networks.absent", (), "cannot import my_package.networks.absent: "),
        ("absent.py:build", (), "file absent.py does not exist"),
        ("my_package/networks.py:absent", (), "my_package/networks.py has no absent"),
        ("my_package.networks.thing", (), "is an int, not a function that returns the network"),
        ("my_package.networks.number", (), "returned an int, not a torch.nn.Module"),
        (
            "my_package.networks.needs",
            (),
            "missing 1 required positional argument: 'width'; pass arguments",
        ),
        ("my_package.networks.needs", ("size=3",), "got an unexpected keyword argument 'size'"),
        ("my_package.networks.named", ("in_channels=4",), "images (2, 4, 21, 18)"),
        (
            "my_package.networks.named",
            ("in_channels=4", "--channels", "5"),
            "images (2, 5, 21, 18)",
        ),
        ("my_package.networks.needs", ("3",), "3 is not key=value, an argument of the function"),
        ("my_package.networks.Noise", (), "results of a single process vary between runs"),
        (
            "my_package.networks.Exact",
            ("--channels", "4"),
            "images (2, 4, 21, 18) (--batch, --channels, --size): RuntimeError at ",
        ),
        (
            "my_package.networks.Exact",
            ("--grid", "30x1"),
            "an image of 21x18 is smaller than the grid 30x1",
        ),
        (
            "my_package.networks.Exact",
            ("--grid", "2x1x1"),
            "an image of 21x18 has 2 dims, but the grid 2x1x1 has 3: --grid and --size must",
        ),
    ],
)
def test_mistakes_are_told_before_ranks_start(
    folder: Path,
    name: str,
    options: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(command, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    arguments = [name, "--size", "21x18", "--grid", "2x1", *options]
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    said = str(stop.value)
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert sentence in said


def test_a_mistake_is_told_once(folder: Path) -> None:
    done = check(folder, "no_package.build", "--size", "21x18", "--grid", "2x1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: cannot import no_package.build")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("size", ["96x", "0x8", "axb", "2x2x2x2"])
def test_what_is_no_size(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "nets.build", "--size", size, "--grid", "2x1"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2
    assert f"{size} must be one to three positive numbers" in capsys.readouterr().err


def test_other_numbers_are_shown_also_under_a_launcher(folder: Path) -> None:
    done = check(
        folder, "my_package.networks.Wrong", "--size", "12x10", "--grid", "2x1", "--eval",
        "--dtype", "float32", launcher=mpiexec_command(2),
    )  # fmt: skip
    assert done.returncode == 1
    assert "float32, evaluation, on 2x1 ranks" in done.stdout
    assert "NOT EQUAL to a single process" in done.stdout
    assert "output: off by up to " in done.stdout
    assert done.stdout.splitlines()[-1] == "not exact"
    assert done.stdout.count("not exact") == 1
