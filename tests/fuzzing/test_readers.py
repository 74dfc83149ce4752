from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing.child import Child
from tests.fuzzing.mutations import changed_bytes, changed_json, changed_safetensors

_JSON = ("manifest", "geojson", "checkpoint", "resume", "records")
_HEADS = {"shard": 8192, "inspect": 8192, "weights": 2048}
"""Bytes from which on there is nothing but pixels and numbers."""

FEW = {
    **{"manifest": 200, "shard": 120, "csv": 200, "geojson": 200},
    **{"xml": 100, "weights": 60, "slide": 30, "inspect": 4, "records": 60},
    **{"checkpoint": 40, "resume": 5, "config": 10},
}
MANY = {
    **dict.fromkeys(FEW, 1000),
    **dict.fromkeys(("manifest", "shard", "csv", "geojson"), 10_000),
}


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with Child(tmp_path_factory.mktemp("fuzzing") / "inputs") as made:
        yield made


def inputs_of(name: str, valid: list[bytes]) -> st.SearchStrategy[tuple[int, bytes]]:
    """Changed inputs of a target, each with the number of the valid one."""
    strategies = []
    for number, one in enumerate(valid):
        changed = changed_bytes(one, _HEADS.get(name))
        if name in _JSON and one.lstrip()[:1] in (b"{", b"["):
            document = changed_json(json.loads(one))
            changed = st.one_of(document, document.filter(bool), changed)
        elif one[8:10] == b'{"':
            changed = st.one_of(changed_safetensors(one), changed)
        strategies.append(st.tuples(st.just(number), changed))
    return st.one_of(strategies)


def give(name: str, count: int, child: Child, **how: Any) -> None:
    """Give a reader so many inputs; the smallest that it does not take well is shown."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        **how,
    )
    @given(inputs_of(name, child.valid(name)))
    def take(made: tuple[int, bytes]) -> None:
        outcome = child.attempt(name, *made)
        assert outcome.clean, f"{outcome.kind}: {outcome.said}"

    take()


@pytest.mark.parametrize("name", FEW)
def test_damaged_inputs_are_refused_in_a_sentence(name, child):
    give(name, FEW[name], child, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", MANY)
def test_many_damaged_inputs_are_refused_in_a_sentence(name, child):
    give(name, MANY[name], child, derandomize=False)  # others each time
