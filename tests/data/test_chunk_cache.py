from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from spatialdl.data.chunk_cache import ChunkCache


def chunk(number: int, size: int = 100) -> np.ndarray:
    return np.full(size, number, np.uint8)


def test_the_longest_unused_is_dropped_first() -> None:
    cache = ChunkCache(400)
    for number in range(4):
        cache.put(number, chunk(number))
    assert cache.get(0) is not None
    cache.put(4, chunk(4))
    assert cache.get(1) is None
    assert [cache.get(number) is not None for number in (0, 2, 3, 4)] == [True] * 4
    assert (len(cache), cache.nbytes) == (4, 400)
    cache.put(5, chunk(5, 200))
    assert cache.nbytes == 400
    assert [cache.get(number) is not None for number in (0, 2, 3, 4, 5)] == [False] * 2 + [True] * 3


def test_what_is_put_again_counts_once() -> None:
    cache = ChunkCache(400)
    for _ in range(9):
        cache.put("a", chunk(1))
    assert (len(cache), cache.nbytes) == (1, 100)
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_what_would_fill_it_is_not_kept() -> None:
    cache = ChunkCache(400)
    cache.put("a", chunk(1))
    cache.put("b", chunk(1, 201))
    assert cache.get("b") is None
    assert cache.get("a") is not None


def test_nobody_writes_to_what_is_kept() -> None:
    cache = ChunkCache(400)
    cache.put("a", chunk(1))
    found = cache.get("a")
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 2


def test_threads_share_it() -> None:
    cache = ChunkCache(2_000)

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 40, 2_000).tolist():
            found = cache.get(number)
            if found is None:
                cache.put(number, chunk(number))
            else:
                assert found[0] == number

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.nbytes == 100 * len(cache) <= 2_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_begins_with_an_empty_one_even_where_it_was_locked() -> None:
    cache = ChunkCache(400)
    cache.put("a", chunk(1))
    with cache._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if cache.get("a") is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("a") is not None
