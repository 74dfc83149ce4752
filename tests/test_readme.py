"""README and pages keep their word: Python runs, commands are understood, links hold.

Tutorials, whose commands run too, are in test_tutorial.py.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from spatialdl import check, export
from spatialdl.comm.launch import mpiexec_command
from spatialdl.common.configuring.keys import file_of, groups, keys_of
from spatialdl.common.configuring.overrides import check_overrides
from spatialdl.common.configuring.own_keys import rewritten
from spatialdl.data.importing import command as importing
from spatialdl.data.staging import command as staging
from spatialdl.inference.analysis import analyze_cli
from spatialdl.inference.features import options as features
from spatialdl.slides.batch import tile_options as tiling
from spatialdl.training.checks import check_config
from tests.composing import composed
from tests.processes import printed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {page: page.read_text() for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
README = PAGES[ROOT / "README.md"]
ALL = "\n".join(PAGES.values())
CONF = ROOT / "spatialdl" / "conf"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", ALL, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of all shell lines that run `program`, from there on."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("sh") for line in block.split("\n")
    ]
    return [line[line.index(program) :] for line in lines if program in line]


def name_of(block: str) -> str:
    """Every block of Python begins with the name of its file."""
    found = re.match(r"# (\w+\.py)\n", block)
    assert found, block
    return found[1]


RUN_ELSEWHERE = ("train_plain.py", "train_split.py")
"""By tests/training/test_lightning.py, which compares their losses."""


TOGETHER = ("init_mesh", "init_process_group", "spatialdl.Pipeline(", "grid=(2, 1)")
"""What a program that runs on ranks has in it; of the pages, all run on two."""

RUNNER = """
import os, runpy, sys

if __name__ == "__main__":  # and not again in processes that programs start
    here, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    for folder, program in (os.path.split(word) for word in sys.argv[1:]):
        print(f"running {folder}/{program}", flush=True)
        os.chdir(os.path.join(here, folder))
        sys.path[:] = [os.getcwd(), *path]
        runpy.run_path(os.path.abspath(program), run_name="__main__")
        for name in set(sys.modules) - modules:  # of its own, which another page may have, too
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(here):
                del sys.modules[name]
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_python_runs(ranks, tmp_path):
    """All programs of all pages, one after the other: starting a process takes longer than most."""
    (tmp_path / "runner.py").write_text(RUNNER)
    programs, said = [], 0
    for page, text in PAGES.items():
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            name, runs_on = name_of(block), 2 if any(word in block for word in TOGETHER) else 1
            (tmp_path / page.stem).mkdir(exist_ok=True)
            (tmp_path / page.stem / name).write_text(block)
            if runs_on == ranks and name not in RUN_ELSEWHERE:
                programs.append(f"{page.stem}/{name}")
                said += "refusal" in block
    launcher = [*mpiexec_command(2), sys.executable, "-m", "mpi4py"]
    start = launcher if ranks == 2 else [sys.executable]
    text = printed([*start, "runner.py", *programs], tmp_path, 280)
    refusal = " ".join(next(text for text in blocks("text") if "not supported on" in text).split())
    assert text.count(refusal) == 2 * said
    if "README/four_lines.py" in programs:
        (shown,) = (text for text in blocks("text") if text.startswith("rank 0: loss"))
        assert set(shown.splitlines()) <= set(text.splitlines())


def test_the_network_that_is_checked_is_exact(tmp_path):
    (network,) = (block for block in blocks("python") if name_of(block) == "networks.py")
    (tmp_path / "networks.py").write_text(network)
    (words,) = commands("spatialdl.check")
    text = printed([sys.executable, "-m", *words], tmp_path)
    assert "equal to a single process" in text


@pytest.mark.parametrize("words", commands("spatialdl.train"), ids=" ".join)
def test_a_training_command_is_understood(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # of the commands before it
    for folder in ("tiles", "my_set", "photo_set", "scan_set", "volume_set"):
        (tmp_path / folder).mkdir()
    for table in ("receptors.csv", "labels.csv", "split.csv", "ages.csv", "survival.csv"):
        (tmp_path / table).touch()
    given = [rewritten(word) for word in words[1:] if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(given)
    (runs,) = BasicSweeper.split_arguments(parsed, None)
    assert len(runs) == 1 or "-m" in words
    for overrides in runs:
        check_config(composed("train", *overrides))


def tile(words: list[str]) -> None:
    if words[0] in ("inspect", "verify"):
        tiling.parsed_path(words[0], words[1:])
    else:
        tiling.parsed(words)


TAKES = {
    "spatialdl.check": check._options,
    "spatialdl.export": export._parse,
    "spatialdl.plan": lambda words: check_overrides(words, "plan"),
    "spatialdl-analyze": lambda words: analyze_cli.parser().parse_args(words),
    "spatialdl-features": features.parsed,
    "spatialdl-import": lambda words: importing._parser().parse_args(words),
    "spatialdl-stage": lambda words: staging._parser().parse_args(words),
    "spatialdl-tile": tile,
}


def in_text(program: str) -> list[list[str]]:
    """Commands above what they printed."""
    lines = [shlex.split(line) for text in blocks("text") for line in text.splitlines()[:1]]
    return [line[line.index(program) :] for line in lines if program in line]


OTHERS = [one for program in TAKES for one in (*commands(program), *in_text(program))]


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_any_other_command_is_understood(words):
    TAKES[words[0]](words[1:])


def test_every_key_that_is_named_is_one():
    files = [*CONF.glob("*.yaml")]
    files += [file_of(group, choice) for group, choices in groups().items() for choice in choices]
    known = {key.name for file in files for key in keys_of(file)}
    known |= {group.replace("/", ".") for group in groups()}
    kinds = "trainer|data|parallel|optimizer|scheduler|task|comm"
    found = rf"(?<![\w./-])((?:{kinds})(?:\.[a-z0-9_]+)+)"
    named = set(re.findall(rf"`[^`\n]*?{found}", ALL)) | set(re.findall(rf"[ \"]{found}=", ALL))
    own = {"task.loss.gamma", "optimizer._target_", "task.loss._target_", "data.py"}
    # of users and of Lightning
    others = ("data.dataset.", "data.validation.", "trainer.strategy.", "trainer.fit")
    named = {name for name in named if not name.startswith(others)}
    assert len(named) > 60
    assert sorted(named - known - own) == []


@pytest.mark.parametrize("words", commands("spatialdl.predict"), ids=" ".join)
def test_a_predicting_command_is_understood(words):
    composed("predict", *words[1:])


TOLD = ("parallel", "model", "optimizer", "task", "scheduler")


def test_there_are_commands():
    assert len(commands("spatialdl.train")) >= 6
    assert len(commands("mpiexec")) >= 3
    assert {words[0] for words in OTHERS} == set(TAKES)


@pytest.mark.parametrize("group", [*TOLD, "data", "logger", "cluster"])
def test_every_choice_that_is_named_is_there_and_the_other_way_round(group):
    prose = re.sub(r"^```python\n.*?^```$", "", ALL, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(rf"(?<![\w.]){group}=([a-z][\w+]+)", prose))
    # short forms, such as task=bag, are no files
    named = {one for one in named if rewritten(f"{group}={one}") == f"{group}={one}"}
    there = set(groups()[group])
    assert named <= there
    if group in TOLD:
        assert named == there


def test_every_page_is_linked_from_the_index():
    """Of decisions, from their own index."""
    for page in PAGES:
        if page.parent.parent == DOCS:
            assert page.name == "README.md" or f"]({page.name}" in PAGES[page.parent / "README.md"]
        elif page.parent == DOCS:
            assert page.name == "index.md" or f"]({page.name}" in PAGES[DOCS / "index.md"], page


def test_the_readme_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 200
