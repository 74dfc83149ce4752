"""The configuration files read as text, against what Hydra makes of them."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spatialdl.configuring.keys import CONF, about, chosen_by_default, file_of, groups, keys_of

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
inner:  # holds
  deep:
    key: 1e-3  # a # b
last: null  # the end
"""


def test_keys_have_their_place_their_default_and_their_comment(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(FILE)
    assert about(file) == "what it is in two lines"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spatialdl.configuring.keys.CONF", tmp_path)
        assert [tuple(key) for key in keys_of(file)] == [
            ("group.name", "some", "how it is called"),
            ("group.list", "[1, 2]", ""),
            ("group.inner", "", "holds"),
            ("group.inner.deep", "", ""),
            ("group.inner.deep.key", "1e-3", "a # b"),
            ("group.last", "null", "the end"),
        ]


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_defaults_are_those_that_hydra_takes(command):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        composed = compose(command, return_hydra_config=True)
    choices = composed.hydra.runtime.choices
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
    assert package in (
        "",
        f"{file.parent.relative_to(CONF).as_posix().replace('/', '.')}.",
        "parallel.",
    )


def test_a_group_has_choices_that_are_files():
    assert groups()["optimizer"] == ["adamw", "lamb", "lars", "sgd"]
    for group, choices in groups().items():
        assert all(file_of(group, choice).is_file() for choice in choices)
