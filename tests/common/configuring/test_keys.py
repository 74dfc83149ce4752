"""The configuration files and the help read as text, against what Hydra makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf

from spatialdl.common.configuring.help import WIDTH, help_lines
from spatialdl.common.configuring.keys import (
    CONF,
    about,
    chosen_by_default,
    file_of,
    groups,
    keys_of,
)
from spatialdl.common.configuring.registered import NAMES, new_folder
from tests.composing import compose_anew

FILE = """\
# what it is
# @package group
# in two lines
#
# not this
defaults:
  - other  # no

name: some  # how it is called
list: [1, 2]
inner: ${data.mean}  # follows
# rarely set
deep:
  key: 1e-3  # a # b
last: null  # the end
"""


def test_keys_have_their_place_their_default_and_their_comment(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(FILE)
    assert about(file) == "what it is in two lines"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spatialdl.common.configuring.keys.CONF", tmp_path)
        assert [tuple(key) for key in keys_of(file)] == [
            ("group.name", "some", "how it is called", False),
            ("group.list", "[1, 2]", "", False),
            ("group.inner", "${data.mean}", "follows", True),
            ("group.deep", "", "", True),
            ("group.deep.key", "1e-3", "a # b", True),
            ("group.last", "null", "the end", True),
        ]


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_defaults_are_those_that_hydra_takes(command):
    choices = compose_anew(command, with_hydra=True).hydra.runtime.choices
    ours = {group: str(choice) for group, choice in choices.items() if "hydra" not in group}
    found = chosen_by_default(command).items()
    assert {group: "None" if one == "null" else one for group, one in found} == ours


def names(node: dict, prefix: str = ""):
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from names(value, f"{prefix}{name}.")


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda f: f.stem)
def test_the_keys_are_those_that_yaml_finds(file):
    loaded = OmegaConf.to_container(OmegaConf.load(file))
    loaded.pop("defaults", None)
    found, expected = [key.name for key in keys_of(file)], list(names(loaded))
    package = found[0].removesuffix(expected[0]) if found else ""
    assert found == [package + name for name in expected]
    assert package in ("", f"{file.parent.relative_to(CONF).as_posix().replace('/', '.')}.")


def test_a_group_has_choices_that_are_files():
    assert groups()["optimizer"] == ["adamw", "lamb", "lars", "sgd"]
    for group, choices in groups().items():
        files = [choice for choice in choices if file_of(group, choice).is_file()]
        assert files == [choice for choice in choices if choice not in NAMES]


def listed(command: str, *arguments: str) -> list[str]:
    """The keys that a help lists, in its order."""
    lines = list(help_lines(command, arguments))
    assert max(map(len, lines)) <= WIDTH
    starts = [line[2:].split()[0] for line in lines if re.match(r"  [a-z]", line)]
    return [word for word in starts if "." in word or word in OF_NO_GROUP]


OF_NO_GROUP = {key.name for file in CONF.glob("*.yaml") for key in keys_of(file)}


@pytest.mark.parametrize("command", ["train", "plan", "predict", "evaluate"])
def test_it_says_every_choice_and_the_keys_that_are_often_set(command):
    shown, text = listed(command), "\n".join(help_lines(command))
    assert len(set(shown)) == len(shown)
    for group, choice in chosen_by_default(command).items():
        assert all(other in text for other in groups()[group])
        of_group = set(listed(command, group))
        if choice == "null":
            continue
        for key in keys_of(file_of(group, choice)):
            if key.default and not key.name.endswith(("._partial_", ".name")):
                assert key.name in of_group, key
                assert (key.name in shown) != key.is_rare, key
    assert "Powered by Hydra" not in text


def test_keys_to_train_fit_on_a_few_pages():
    assert len(listed("train")) <= 65


def test_a_choice_lists_its_keys_and_a_group_what_others_have_beside():
    assert "data.path" in listed("train", "--help", "data=shards")
    assert "data.samples" not in listed("train", "data=shards", "--help")
    text = "\n".join(help_lines("train", ["model"]))
    part = text.partition("\nmodel=amoebanet_d\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in part.splitlines()] == ["model.layers", "model.filters"]


@pytest.mark.parametrize(
    ("command", "words"),
    [("train", "seed=1 --help"), ("plan", "-h"), ("predict", "--help"), ("evaluate", "--help")],
)
def test_help_comes_without_pytorch(command, words):
    code = (
        f"import runpy, sys; sys.argv = ['x', *{words.split()}]; "
        f"runpy.run_module('spatialdl.{command}', run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"python -m spatialdl.{command} [key=value ...]\n")
    assert done.stderr == ""


def test_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [new_folder("a/b") for _ in range(3)] == ["a/b", "a/b-2", "a/b-3"]
    (tmp_path / "a" / "c").touch()
    assert new_folder("a/c") == "a/c-2"


def test_those_who_ask_at_once_never_get_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(new_folder, ["x/y"] * 30))
    assert sorted(found) == sorted(["x/y", *(f"x/y-{n}" for n in range(2, 31))])


def test_a_configuration_has_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hydra = compose_anew("train", with_hydra=True).hydra
    assert hydra.run.dir == hydra.run.dir
    (folder,) = (tmp_path / "outputs").iterdir()
    assert hydra.run.dir == f"outputs/{folder.name}"
