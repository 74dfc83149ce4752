"""CPU time of a training step on split tensors against plain PyTorch, without messages.

The step is forward and backward of small images, where Python's share is largest. A grid of one
rank exchanges nothing; in larger grids messages are dropped, so that halos are zeros and only the
time is meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.bench.results import machine, median_ratio
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.single_process import Completed
from spatialdl.models import resnet50
from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.spatial.split import from_local

WARM_UP = 2


class SilentPeers(Dry):
    """Communicator that drops all messages, for tensors with data."""

    def start_exchange(self, *args: Any) -> Completed:
        return Completed()

    def all_gather(self, values: Tensor) -> Tensor:
        return values.expand(self.size, *values.shape).clone()


class InvertedResidual(nn.Module):
    """A block of EfficientNet (Tan and Le, 2019)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide, narrow = inputs * expand, max(1, inputs // 4)
        self.expand = _layer(inputs, wide, 1)
        self.depthwise = _layer(wide, wide, kernel, stride, wide)
        self.squeeze, self.excite = nn.Conv2d(wide, narrow, 1), nn.Conv2d(narrow, wide, 1)
        self.project = _layer(wide, outputs, 1)[:2]
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.depthwise(self.expand(x))
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        y = self.project(y * gate.sigmoid())
        return x + y if self.is_residual else y


def _layer(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


def efficientnet_b0(num_classes: int) -> nn.Module:
    """EfficientNet-B0, a network of many small operations."""
    blocks: list[nn.Module] = [_layer(3, 32, 3, 2)]
    inputs = 32
    for expand, outputs, repeats, stride, kernel in (
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
        *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    ):
        for number in range(repeats):
            step = stride if number == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, kernel, step, expand))
            inputs = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, num_classes))
    return nn.Sequential(*blocks, _layer(320, 1280, 1), *head)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "efficientnet_b0": efficientnet_b0,
    "resnet50": resnet50,
}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spatialdl.bench overhead", description=__doc__)
    parser.add_argument("--size", type=int, default=64, help="side of a tile (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="images per step (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="steps per variant (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.size, options.batch, options.rounds, *options.ranks) < 1:
        raise ValueError("size, batch, ranks and rounds must be at least 1")
    return options


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}, {options.batch} images, tiles of {options.size}x{options.size}\n")
    print(f"{'network':18}{'ranks':>6}{'plain, CPU s':>14}{'split, CPU s':>14}{'ratio':>8}")
    for name, make in NETWORKS.items():
        network = make(num_classes=10)
        for ranks in options.ranks:
            plain, split = compare(network, ranks, options.size, options.batch, options.rounds)
            ratio = median_ratio(split, plain)
            seconds = "".join(f"{statistics.median(side):14.3f}" for side in (plain, split))
            print(f"{name:18}{ranks:6}{seconds}{ratio:8.2f}")


def compare(
    network: nn.Module, ranks: int, size: int, batch: int, rounds: int
) -> tuple[list[float], list[float]]:
    """CPU seconds of `rounds` steps on a plain tile and on a split one, alternately."""
    comm = SilentPeers(0, ranks)
    mesh = Mesh(Axes(spatial=nearly_cubic(ranks)), 0, 0, comm, comm)
    whole = (size * mesh.grid[0], size * mesh.grid[1])
    tile, labels = torch.randn(batch, 3, size, size), torch.arange(batch) % 10
    plain: list[float] = []
    split: list[float] = []
    for _ in range(WARM_UP + rounds):
        plain.append(_step(network, tile, labels))
        split.append(_step(network, from_local(tile, mesh, whole), labels))
    return plain[WARM_UP:], split[WARM_UP:]


def _step(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.zero_grad()
    started = time.process_time()
    F.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started
