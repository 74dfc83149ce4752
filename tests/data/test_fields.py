from __future__ import annotations

import json

import pytest

from spatialdl.data import fields


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (fields.whole, [0, 2**63 - 1], [-1, 2**63, 1.0, True, "1", None]),
        (fields.place, [-5, -(2**63)], [2**63, 0.5, False]),
        (fields.positive, [1, 0.25], [0, -1, float("nan"), float("inf"), 10**400, True, "1"]),
        (fields.text, ["", "a"], [1, None, ["a"]]),
        (fields.flag, [True, False], [0, 1, "true", None]),
        (fields.table, [{}], [[], None, "{}"]),
        (fields.tables, [[], [{}]], [{}, [[]], [{}, None], "a"]),
        (fields.texts, [[], ["a"]], ["a", [1], None]),
    ],
)
def test_nothing_is_converted(read, good, bad):
    for value in good:
        assert read({"key": value}, "key") == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^key .*is .*expected"):
            read({"key": value}, "key")
    with pytest.raises(KeyError):
        read({}, "key")


def test_a_long_value_is_not_shown_whole():
    with pytest.raises(ValueError, match="expected a string") as caught:
        fields.text({"key": list(range(10**6))}, "key")
    assert len(str(caught.value)) < 200


def test_json_that_is_ambiguous_or_endless_is_refused():
    assert fields.parse('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    with pytest.raises(ValueError, match="duplicate key 'b'"):
        fields.parse('{"a": {"b": 1, "c": 2, "b": 1}}')
    with pytest.raises(ValueError, match="nested too deeply"):
        fields.parse("[" * 10**5 + "]" * 10**5)
    with pytest.raises(json.JSONDecodeError):
        fields.parse("{")
