from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing.child import Child
from tests.fuzzing.mutations import changed_bytes, changed_json
from tests.fuzzing.targets import TARGETS

_JSON = ("manifest", "geojson", "checkpoint", "resume")
_HEADS = {"shard": 8192, "inspect": 8192, "weights": 2048}
"""Bytes from which on there is nothing but pixels and numbers."""

FEW = {"manifest": 250, "shard": 150, "csv": 250, "geojson": 250}
MANY = {
    **dict.fromkeys(("manifest", "shard", "csv", "geojson"), 10_000),
    **{
        "inspect": 200,
        "xml": 2000,
        "checkpoint": 1000,
        "weights": 1000,
        "slide": 1000,
        "config": 300,
    },
    "resume": 60,
}


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Child]]:
    folder = tmp_path_factory.mktemp("fuzzing")
    found = {name: Child(name, folder / name) for name in MANY}
    yield found
    for child in found.values():
        child.close()


def inputs_of(name: str, folder: Path) -> st.SearchStrategy[tuple[int, bytes]]:
    """Changed inputs of a target, each with the number of the valid one."""
    valid = TARGETS[name](folder).valid()
    strategies = []
    for number, one in enumerate(valid):
        changed = changed_bytes(one, _HEADS.get(name))
        if name in _JSON and one.lstrip()[:1] in (b"{", b"["):
            changed = st.one_of(changed_json(json.loads(one)), changed)
        strategies.append(st.tuples(st.just(number), changed))
    return st.one_of(strategies)


def give(name: str, count: int, folder: Path, child: Child, **how: Any) -> None:
    """Give a reader so many inputs; the smallest that it does not take well is shown."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        **how,
    )
    @given(inputs_of(name, folder))
    def take(made: tuple[int, bytes]) -> None:
        outcome = child.attempt(*made)
        assert outcome.clean, f"{outcome.kind}: {outcome.said}"

    take()


@pytest.mark.parametrize("name", FEW)
def test_damaged_inputs_are_refused_in_a_sentence(name, tmp_path, children):
    give(name, FEW[name], tmp_path, children[name], derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", MANY)
def test_many_damaged_inputs_are_refused_in_a_sentence(name, tmp_path, children):
    give(name, MANY[name], tmp_path, children[name])
