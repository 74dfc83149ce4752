"""`SpatialTensor` and its operations, one family of operations per file.

A network sees one tensor of the global shape. Each rank holds a tile of it, and computes its tile
of every result. The life of a convolution, in the order in which to read:

1. `split.py`: `shard` cuts an image to boxes, which follow from the sizes (`layout/layout.py`).
2. `tensor.py`: PyTorch hands ``conv(x)`` to `SpatialTensor.__torch_function__`.
3. `table.py`: the table names the handler of each function; what has none is refused.
4. `conv.py`: the handler. All that follows is called from there.
5. `window.py`: from kernel, stride and padding the layout of the output, and the plan of which rank
   needs which pixels of which other rank (`comm/plan.py`).
6. `halo_geometry.py`: the halo strips of a tile, and the outputs and taps that read them.
7. `comm/exchange.py`: sends and receives the strips, in forward and, reversed, in backward.
8. `window_function.py`: PyTorch's kernels on a tile; and on its copy with the halo, where a tile
   has no pixels or the weight is large.
9. `spatial/parallel.py`: backward leaves on each rank the part of the weight gradient that comes
   from its tile; their average is the gradient of the whole image.

A halo exchange of a 3x3 convolution, one row of pixels shown. A convolution is linear, so each rank
convolves its tile with zeros around it while the strips are under way, and then adds what they
contribute to the outputs at the edge::

                   rank 0                             rank 1
    tile        0  a  b  c  d  e  0                0  f  g  h  i  j  0
    strips                     e  ---------------> e
                               f  <--------------- f
    outputs        A  B  C  D  E'                     F' G  H  I  J
                    E = E' + last taps * f             F = F' + first taps * e

In backward the gradients of the strips go back the same way, and are added to those of the tiles.

Then: `dims.py` (where rows and columns are after a permute or a view), `operands.py` (other tensors
beside a split one), `span.py` (reductions), `contract.py` (products), `reindex.py` (pixels that
move), `ring.py` (attention), `one_rank.py` (grids of one rank), `recompute.py`.
"""

from spatialdl.spatial import (  # noqa: F401  (imported to register handlers)
    adaptive,
    along,
    attention,
    conv,
    extremes,
    fold,
    index,
    layer_norm,
    losses,
    matmul,
    moments,
    norm,
    one_rank,
    operands,
    pool,
    rearrange,
    reduce,
    resample,
    slices,
    transposed,
    views,
)
from spatialdl.spatial.tensor import SpatialTensor, register_op

__all__ = ["SpatialTensor", "register_op"]
