"""Exact training of unmodified vision networks on images split over many ranks.

In a training loop, on every rank::

    mesh = spatialdl.init_mesh(grid=(2, 1))      # maps ranks to parts of an image
    x = spatialdl.shard(image, mesh)             # or from_local(tile, mesh, size=(H, W))
    loss = criterion(model(x), labels)           # any nn.Module; x.shape is the global one
    loss.backward()
    spatialdl.average_gradients(model, mesh)     # or model = SpatialParallel(model, mesh) before

Images are (N, C, H, W) and split along H and W; sizes are (rows, columns) in pixels, boxes
half-open (row0, row1, col0, col1). An operation that is not supported on a split image raises
`UnsupportedSpatialOp`; an invalid setting raises ValueError before any computation.

In a single process, tile by tile, with activations offloaded to disk if memory is full::

    loss = criterion(spatialdl.stream(model, image, grid=(8, 8), limit_gb=2), labels)

`spatialdl.data` reads and writes data sets; commands are ``python -m spatialdl.train``, ``.plan``,
``.evaluate``, ``.predict``, ``.check`` and ``.export``.

Importing this package initialises neither MPI nor a GPU; `init_mesh` does. It does not import
PyTorch either, which launcher processes do not need: most names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from spatialdl import torchvision_operators
from spatialdl.comm import allocator
from spatialdl.errors import CommMismatch, ShardError, SlideError, UnsupportedSpatialOp
from spatialdl.version import __version__

allocator.prepare()
torchvision_operators.prepare()

if TYPE_CHECKING:
    from spatialdl.comm.mesh import Mesh, init_mesh
    from spatialdl.pipeline.front import Pipeline
    from spatialdl.pipeline.streamed import stream
    from spatialdl.spatial import SpatialTensor, register_op
    from spatialdl.spatial.parallel import (
        SpatialParallel,
        average_gradients,
        clip_grad_norm_,
        full_state_dict,
    )
    from spatialdl.spatial.recompute import recompute_blocks
    from spatialdl.spatial.split import from_local, gather_before, shard
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
    "SpatialParallel": "spatialdl.spatial.parallel",
    "SpatialTensor": "spatialdl.spatial",
    "average_gradients": "spatialdl.spatial.parallel",
    "clip_grad_norm_": "spatialdl.spatial.parallel",
    "from_local": "spatialdl.spatial.split",
    "full_state_dict": "spatialdl.spatial.parallel",
    "gather_before": "spatialdl.spatial.split",
    "init_mesh": "spatialdl.comm.mesh",
    "recompute_blocks": "spatialdl.spatial.recompute",
    "register_op": "spatialdl.spatial",
    "shard": "spatialdl.spatial.split",
    "stream": "spatialdl.pipeline.streamed",
}

_MODULES = {"bags": "spatialdl.training.bags", "random": "spatialdl.spatial.random"}


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FOUND_IN[name]), name)
    return value


def __dir__() -> list[str]:
    """All names, imported or not."""
    return sorted({*globals(), *__all__})
