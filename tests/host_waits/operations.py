"""Host waits and copies of single operations on a split image, called for the second time.

    python -m tests.host_waits.operations

Prints as JSON those that are not of the transport, by operation and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.host_waits import device

device.install()

from spatialdl.comm.mesh import Mesh  # noqa: E402
from spatialdl.parallel.axes import Axes  # noqa: E402
from spatialdl.random import keyed  # noqa: E402
from spatialdl.spatial.tensor import from_tile  # noqa: E402
from tests.host_waits.ledger import Ledger  # noqa: E402
from tests.host_waits.transport import CountedMpi  # noqa: E402

CHANNELS, SIZE = 8, (41, 53)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, (50, 70), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, (50, 70), mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, (30, 20), mode="bilinear", antialias=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 7),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 7),
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "conv": lambda x: F.conv2d(x, _weight(3), stride=2, padding=2, dilation=2),
    "conv_transpose": lambda x: F.conv_transpose2d(x, _weight(3), stride=2, padding=1),
    "pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: torch.roll(x, (3, 5), (2, 3)),
    "slice": lambda x: x[:, :, 3:, ::2],
    "cat": lambda x: torch.cat([x, x], 2),
    "mean": lambda x: x.mean((2, 3)),
    "std": lambda x: x.std((2, 3)),
    "norm": lambda x: x.norm(),
    "max": lambda x: x.max(3).values,
    "softmax": lambda x: x.softmax(3),
    "logsumexp": lambda x: torch.logsumexp(x, (2, 3)),
    "dropout": lambda x: F.dropout(x, 0.1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1), ignore_index=3),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
}


def _weight(kernel: int) -> Tensor:
    return torch.empty(CHANNELS, CHANNELS, kernel, kernel, device=device.NAME)


def _run(operation: Callable[[Tensor], Tensor], mesh: Mesh, ledger: Ledger) -> None:
    layout = mesh.layout(2, SIZE)
    with keyed(0, 0):
        ledger.is_on = False
        box = mesh.own_box(layout).shape[1:]
        tile = torch.empty(2, CHANNELS, *box, device=device.NAME)
        x = from_tile(tile, layout, mesh).requires_grad_()
        ledger.is_on = True
        operation(x).sum().backward()  # type: ignore[no-untyped-call]


def counted(operation: Callable[[Tensor], Tensor], part: int) -> dict[str, int]:
    """By kind and line what a rank of 2x2 waits for and copies, the transport's left out."""
    with device.counting() as ledger:
        comm = CountedMpi(ledger, part, range(4))
        mesh = Mesh(Axes(spatial=(2, 2)), part, 0, comm, comm)
        _run(operation, mesh, ledger)
        for places in ledger.events.values():
            places.clear()
        _run(operation, mesh, ledger)
    return {
        f"{kind}: {place.does}": count
        for kind in ("waits", "d2h", "h2d")
        for place, count in ledger.events[kind].items()
        if not place.does.startswith(("comm/mpi.py", "comm/device_transport.py"))
    }


if __name__ == "__main__":
    found = {
        f"{name}, rank {part}": counted(operation, part)
        for (name, operation), part in zip(OPERATIONS.items(), cycle((0, 3)), strict=False)
    }
    print(json.dumps(found))
