from __future__ import annotations

import os
import sys

import pytest

from spatialdl.comm import allocator
from spatialdl.planning import worker


@pytest.mark.parametrize("plain", [False, True])
def test_memory_is_as_pytorch_comes_or_as_the_product_sets_it(plain):
    found = worker.environment(2, plain)
    assert found["OMP_NUM_THREADS"] == "2"
    settings = {allocator.SWITCH: "0"} if plain else allocator.environment()
    assert settings.items() <= found.items()


def test_a_worker_tells_in_its_last_line():
    program = "import os; print('starting'); print(os.environ['FOUND'])"
    environment = {**os.environ, "FOUND": '{"seconds": [1.5]}'}
    found = worker.run_worker([sys.executable, "-c", program], environment)
    assert found == {"seconds": [1.5]}


def test_a_worker_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match="no such model"):
        worker.run_worker([sys.executable, "-c", "raise SystemExit('no such model')"], {})
