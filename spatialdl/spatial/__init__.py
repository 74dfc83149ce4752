"""`SpatialTensor` and its operations, one family of operations per file."""

from spatialdl.spatial import (  # noqa: F401  (imported to register handlers)
    adaptive,
    along,
    attention,
    conv,
    extremes,
    fold,
    index,
    losses,
    matmul,
    moments,
    norm,
    operands,
    pool,
    rearrange,
    reduce,
    resample,
    slices,
    transposed,
    views,
    whole,
)
from spatialdl.spatial.tensor import SpatialTensor, register_op

__all__ = ["SpatialTensor", "register_op"]
