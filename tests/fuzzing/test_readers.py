"""Files that a fuzzer has made, given to whatever reads files of others.

`targets` has the readers: each makes small valid files with the real writers and reads what was
made of them, in all the ways in which the commands do. `mutations` are hypothesis strategies that
change valid files: bits, integers, words, pieces; in JSON also values, types, keys and depth.
`child` is the process in which they are read: a crash, 10 s of its own time, 2 GiB, an exception
that is no sentence (other than ours, `ValueError`, `OSError`), and anything that Python opens,
renames, starts or unpickles outside of the folder of the inputs is trouble. hypothesis then looks
for the smallest input with that trouble.

A smoke runs always, the same every time; `-m slow` gives 10,000 new inputs to the readers of
manifests, shards, tables and annotations, and fewer to those that take longer. What was found has a
test of its own beside those of the reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing.child import Child, Misbehaving
from tests.fuzzing.mutations import changed_bytes, changed_json, changed_safetensors

_JSON = ("manifest", "geojson", "checkpoint", "records")
_HEADS = {"shard": 8192}
"""Bytes from which on there is nothing but pixels and numbers."""

FEW = {
    "manifest": 12,
    "shard": 10,
    "csv": 200,
    "geojson": 200,
    "xml": 60,
    "records": 20,
    "slide": 4,
}
MANY = {
    **dict.fromkeys((*FEW, "checkpoint"), 1000),
    **dict.fromkeys(("manifest", "shard", "csv", "geojson"), 10_000),
}


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder = tmp_path_factory.mktemp("fuzzing")
    (folder / "secret").touch()
    with Child(folder / "inputs") as made:
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


def test_what_a_reader_does_is_noticed_and_takes_nobody_with_it(child):
    give = partial(child.attempt, Misbehaving.__name__, 0, cpu_s=1.0)
    assert give(b"read") == give(b"remove inside") == ("read", "")
    assert give(b"clean") == ("refused", "ValueError: a.txt")
    for bad, kind, said in (
        (b"unnamed", "wrong", "does not say which file"),
        (b"key", "wrong", "KeyError"),
        (b"eat", "wrong", "MemoryError"),
        (b"write", "wrong", "open writes"),
        (b"look", "wrong", "open reads"),
        (b"unpickle", "wrong", "pickle.find_class"),
        (b"start", "wrong", "subprocess.Popen"),
        (b"rename", "wrong", "os.rename writes"),
        (b"crash", "crash", "Segmentation fault"),
        (b"spin", "hang", "in attempt"),
    ):
        outcome = give(bad)
        assert (outcome.kind, said in outcome.said) == (kind, True), outcome.said
        assert not outcome.clean
