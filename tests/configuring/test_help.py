from __future__ import annotations

import subprocess
import sys

import pytest

from spatialdl.configuring.help import WIDTH, help_lines, wants_help
from spatialdl.configuring.keys import chosen_by_default, file_of, groups, keys_of


@pytest.mark.parametrize("command", ["train", "plan", "predict", "evaluate"])
def test_it_says_every_key_and_every_choice_within_its_width(command):
    lines = list(help_lines(command))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    for group, choice in chosen_by_default(command).items():
        for other in groups()[group]:
            assert other in text
        if choice != "null":
            for key in keys_of(file_of(group, choice)):
                if key.default and not key.name.endswith("._partial_"):
                    assert f"\n  {key.name} " in text or f"\n  {key.name}\n" in text, key
    assert "Powered by Hydra" not in text


def test_a_key_stands_beside_its_default_and_its_comment():
    lines = list(help_lines("train"))
    assert f"  {'data.io':28} {'auto':18} how raw chunks are read:" in "\n".join(lines)
    assert f"  {'parallel.world':28} {'null':18} ranks; null: those" in "\n".join(lines)


def test_a_network_of_another_choice_tells_what_it_has_beside():
    text = "\n".join(help_lines("train"))
    part = text.partition("\nmodel=amoebanet_d\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in part.splitlines()] == ["model.layers", "model.filters"]


def test_who_asks_for_help():
    assert wants_help(["seed=1", "--help"])
    assert wants_help(["-h"])
    assert not wants_help(["seed=1"])


@pytest.mark.parametrize("command", ["train", "plan", "predict", "evaluate"])
def test_help_comes_without_pytorch(command):
    code = (
        f"import runpy, sys; sys.argv = ['x', '--help']; "
        f"runpy.run_module('spatialdl.{command}', run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"python -m spatialdl.{command} [key=value ...]\n")
    assert done.stderr == ""
