"""Process groups over mpi4py, and over gloo to compare with, for the tests of the backend."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def over_mpi4py() -> Iterator[dist.ProcessGroup]:
    """All ranks over mpi4py, as a program gets them."""
    if dist.is_initialized():
        pytest.skip("torch.distributed was initialised by others")
    import spatialdl.comm.backend  # noqa: F401  (registers it)

    dist.init_process_group("mpi4py")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def over_gloo(over_mpi4py: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks over gloo."""
    return dist.new_group(backend="gloo")


@pytest.fixture
def ends_process_group() -> Iterator[None]:
    """Leaves torch.distributed as it was: others want to initialise it themselves."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        gc.collect()
        dist.destroy_process_group()
