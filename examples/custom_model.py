"""Your own network on images split over ranks, beside the same network in one process.

    python examples/custom_model.py                 one process, images in one piece
    mpiexec -n 2 python examples/custom_model.py    upper and lower half on a rank each

Both train in float64 on the same images. A row a step is printed: the loss, and by how much loss
and gradients differ from those of one process. Differences of about 1e-15 are the rounding of sums
that were added up in another order.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl

STEPS = 6
IMAGES, SIZE, CLASSES = 4, (67, 50), 3  # nothing needs to be divisible by anything


class Network(nn.Module):
    """A plain module: a residual, a stride, and attention to channels; nothing knows of ranks."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 5, stride=2, padding=2, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.attention = nn.Conv2d(channels, channels, 1)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(x + self.norm2(self.conv(x)))  # the residual
        x = x * torch.sigmoid(self.attention(F.adaptive_avg_pool2d(x, 1)))
        return self.head(x.mean((2, 3)))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Tensor:
    """Forward and backward, the same lines for a split image and a whole one."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss


def gradient_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two gradients of one parameter."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)


def main() -> None:
    ranks = MPI.COMM_WORLD.size
    mesh = spatialdl.init_mesh(grid=(ranks, 1))
    torch.manual_seed(0)  # the same weights and images on every rank
    model = Network().double()
    alone = copy.deepcopy(model)  # the same network in one process
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    images = torch.randn(IMAGES, 3, *SIZE, dtype=torch.float64)
    labels = torch.arange(IMAGES) % CLASSES
    if mesh.comm.rank == 0:
        print(f"images of {SIZE[0]}x{SIZE[1]} pixels in {ranks}x1 tiles, one a rank")
        print("step    loss   difference of loss   of gradients")
    for step in range(STEPS):
        loss = train_step(model, optimizers[0], spatialdl.shard(images, mesh), labels)
        spatialdl.average_gradients(model, mesh)  # the only line that one process does not need
        expected = train_step(alone, optimizers[1], images, labels)
        differences = abs(loss - expected).item(), gradient_difference(model, alone)
        for optimizer in optimizers:
            optimizer.step()
        if mesh.comm.rank == 0:
            print(f"{step:4} {loss.item():7.4f} {differences[0]:20.1e} {differences[1]:14.1e}")


if __name__ == "__main__":
    main()
