"""Options of the command line, and settings that have changed."""

from __future__ import annotations

import pytest

from spatialdl.inference.features.options import parsed
from spatialdl.inference.features.results import different

COMMON = ["slides", "--out", "out", "--encoder", "package.Net"]


def test_arguments_of_encoders_are_values_of_python():
    words = ["--encoder-args", "a=1e-5", "b=true", "c=None", "d=[1, 2]", "e=gelu", "f=x=y"]
    arguments = parsed([*COMMON, *words]).wish.arguments
    assert arguments == {"a": 1e-5, "b": True, "c": None, "d": [1, 2], "e": "gelu", "f": "x=y"}
    with pytest.raises(ValueError, match="gives a twice"):
        parsed([*COMMON, "--encoder-args", "a=1", "a=2"])


@pytest.mark.parametrize("words", [["--encoder-args", "a"], ["--mean", "1,2"], ["--std", "a,b,c"]])
def test_values_that_cannot_be_end_the_process(words, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed([*COMMON, *words])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("name", "kind", "rest"),
    [
        ("timm:resnet18", "timm", "resnet18"),
        ("timm:hf-hub:a/b", "timm", "hf-hub:a/b"),
        ("transformers:/a:b", "transformers", "/a:b"),
        ("package.Net", "own", "package.Net"),
        ("other:x", "own", "other:x"),
    ],
)
def test_names_say_the_kind(name, kind, rest):
    wish = parsed([*COMMON[:-1], name]).wish
    assert (wish.kind, wish.rest) == (kind, rest)


def test_settings_that_differ_are_named_where_they_lie():
    before = {"encoder": {"width": 3, "pool": None}, "dtype": "float16"}
    now = {"encoder": {"width": 4, "pool": None}, "dtype": "float16", "more": 1}
    assert different(before, before) == []
    assert different(before, now) == ["encoder.width was 3, is 4", "more was None, is 1"]
