"""Exact training of ordinary vision networks on images split over many ranks.

In a program of your own, on every rank::

    mesh = spatialdl.init_mesh(grid=(2, 1))      # which rank has which part of an image
    x = spatialdl.shard(image, mesh)             # or from_local(tile, mesh, size=(H, W))
    loss = criterion(model(x), labels)           # any nn.Module; x.shape is the global one
    loss.backward()
    spatialdl.average_gradients(model, mesh)     # or model = SpatialParallel(model, mesh) before

Images are (N, C, H, W) and split along H and W; sizes are (rows, columns) in pixels, boxes
half-open (row0, row1, col0, col1). What cannot be done on a split image raises
`UnsupportedSpatialOp`; a setting that does not fit raises ValueError before anything is computed.

Without ranks, one tile after the other, with activations on a disk where memory ends::

    loss = criterion(spatialdl.stream(model, image, grid=(8, 8), limit_gb=2), labels)

`spatialdl.data` reads and writes data sets; commands are ``python -m spatialdl.train``, ``.plan``,
``.check``, ``.export`` and ``.bench``.

Importing this package starts neither MPI nor a GPU; `init_mesh` does. Nor does it import PyTorch:
a process that only launches ranks has no use for it. So most names are looked up when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from spatialdl.comm import allocator
from spatialdl.errors import CommMismatch, ShardError, SlideError, UnsupportedSpatialOp
from spatialdl.version import __version__

allocator.prepare()

if TYPE_CHECKING:
    from spatialdl.channels.parallel import (
        SpatialParallel,
        average_gradients,
        clip_grad_norm_,
        full_state_dict,
    )
    from spatialdl.comm.mesh import Mesh, init_mesh
    from spatialdl.pipeline.front import Pipeline
    from spatialdl.spatial import SpatialTensor, register_op
    from spatialdl.spatial.gather import gather_before
    from spatialdl.spatial.recompute import recompute_blocks
    from spatialdl.spatial.split import from_local, shard
    from spatialdl.streaming.streamed import stream
    from spatialdl.training.callbacks import Callback

__all__ = [
    "Callback",
    "CommMismatch",
    "Mesh",
    "Pipeline",
    "ShardError",
    "SlideError",
    "SpatialParallel",
    "SpatialTensor",
    "UnsupportedSpatialOp",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "from_local",
    "full_state_dict",
    "gather_before",
    "init_mesh",
    "recompute_blocks",
    "register_op",
    "shard",
    "stream",
]

_FOUND_IN = {
    "Callback": "spatialdl.training.callbacks",
    "Mesh": "spatialdl.comm.mesh",
    "Pipeline": "spatialdl.pipeline.front",
    "SpatialParallel": "spatialdl.channels.parallel",
    "SpatialTensor": "spatialdl.spatial",
    "average_gradients": "spatialdl.channels.parallel",
    "clip_grad_norm_": "spatialdl.channels.parallel",
    "from_local": "spatialdl.spatial.split",
    "full_state_dict": "spatialdl.channels.parallel",
    "gather_before": "spatialdl.spatial.gather",
    "init_mesh": "spatialdl.comm.mesh",
    "recompute_blocks": "spatialdl.spatial.recompute",
    "register_op": "spatialdl.spatial",
    "shard": "spatialdl.spatial.split",
    "stream": "spatialdl.streaming.streamed",
}


def __getattr__(name: str) -> object:
    """Look a name up when it is first used."""
    if name in ("bags", "random"):
        return import_module(f"spatialdl.{name}")
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FOUND_IN[name]), name)
    return value


def __dir__() -> list[str]:
    """All names, looked up or not."""
    return sorted({*globals(), *__all__})
