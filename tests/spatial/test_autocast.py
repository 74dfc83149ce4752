"""On a GPU; that the types are PyTorch's on a CPU is in tests/mpi/spatial/test_families.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spatialdl.spatial.autocast import as_autocast, in_float32, padded_as

HALF = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16)


def test_nothing_is_cast_without_autocast():
    assert as_autocast(F.interpolate, (HALF,), {"scale_factor": 2}) == (
        (HALF,),
        {"scale_factor": 2},
    )
    assert in_float32(HALF) is HALF
    assert padded_as(HALF, "reflect") is HALF


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_on_a_cpu_pools_and_pads_of_volumes_are_not_cast_as_those_of_images(dims):
    x = torch.ones(1, 2, *[4] * dims, dtype=torch.bfloat16)
    pools = ["avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"]
    with torch.autocast("cpu", torch.bfloat16):
        for function in [getattr(F, f"{name}{dims}d") for name in pools]:
            (cast, _), _ = as_autocast(function, (x, 2), {})
            assert cast.dtype == function(x, 2).dtype, function
        for mode in ("reflect", "replicate", "circular", "constant"):
            assert padded_as(x, mode).dtype == F.pad(x, (1, 1) * dims, mode).dtype, mode
        assert in_float32(x) is x
        assert as_autocast(torch.sum, (x,), {})[0][0] is x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the list is that of CUDA")
def test_on_a_gpu_the_list_is_pytorchs():
    x = HALF.cuda()
    plain = [torch.sum, torch.prod, torch.norm, torch.linalg.vector_norm, torch.mean, F.relu]
    along = [torch.logsumexp, torch.cumsum, torch.cumprod]
    calls = [(F.interpolate, {"scale_factor": 2, "mode": "bilinear"})]
    calls += [(one, {}) for one in plain] + [(one, {"dim": 1}) for one in along]
    with torch.autocast("cuda", torch.bfloat16):
        for function, options in calls:
            (cast,), _ = as_autocast(function, (x,), options)
            assert cast.dtype == function(x, **options).dtype, function
