"""`SpatialTensor` and its operations, one family of operations per file."""

from spatialdl.spatial import (  # noqa: F401  (imported to register handlers)
    adaptive,
    along,
    attention,
    channel_conv,
    conv,
    dropout,
    extremes,
    flip,
    fold,
    group_norm,
    index,
    join,
    layer_norm,
    losses,
    matmul,
    moments,
    norm,
    operands,
    pad,
    pointwise,
    pool,
    reduce,
    resample,
    scatter,
    shuffle,
    slices,
    softmax,
    transposed,
    views,
    whole,
)
from spatialdl.spatial.tensor import SpatialTensor, register_op

__all__ = ["SpatialTensor", "register_op"]
