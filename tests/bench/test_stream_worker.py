"""A step of the benchmark of streamed images, in a process that the kernel limits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from spatialdl.bench import stream_worker
from spatialdl.planning.worker import environment, run_worker


def run(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "spatialdl.bench.stream_worker", "--size", "1024", *words]
    return run_worker(command, environment(1))


@pytest.mark.slow
def test_within_a_limit_a_streamed_step_fits_and_that_of_the_whole_image_does_not(
    tmp_path: Any,
) -> None:
    limit = ["--limit-gb", "0.65"]
    grid = ["--grid", "2", "--live-gb", "0.1", "--store", str(tmp_path)]
    streamed, refused, whole = run(*limit, *grid), run(*limit), run()
    assert not refused["fits"]
    assert "can't allocate memory" in refused["why"]
    assert streamed["fits"]
    assert streamed["resident_gb"] < 0.65 + 0.1  # and libraries
    assert whole["needed_gb"] == whole["resident_gb"] > 0.8
    assert streamed["written_gb"] > 0.3
    assert abs(streamed["loss"] - whole["loss"]) < 1e-5


def test_parts_of_a_picture_are_those_of_the_whole() -> None:
    picture = stream_worker.Picture(5000, torch.device("cpu"))
    whole = picture[:, :, 4000:, 4500:]
    assert whole.shape == (1, 3, 1000, 500)
    assert torch.equal(picture[:, :, 4100:4200, 4600:4601], whole[:, :, 100:200, 100:101])
    assert 0 <= float(whole.min()) < 0.01
    assert 0.99 < float(whole.max()) < 1
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_what_lacks_memory_is_known_from_other_failures() -> None:
    assert stream_worker.lacks_memory(MemoryError())
    assert stream_worker.lacks_memory(RuntimeError("could not create a primitive"))
    assert not stream_worker.lacks_memory(RuntimeError("shape '[1]' is invalid"))
