"""Train your own network on images split over ranks, and compare with a single process.

    python examples/custom_model.py                 single process, whole images
    mpiexec -n 2 python examples/custom_model.py    upper and lower half on one rank each

Both train in float64 on the same images. Each step prints the loss, and the differences of loss
and gradients from the single process. Differences of about 1e-15 are rounding errors of sums in
another order.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl

STEPS = 6
IMAGES, SIZE, CLASSES = 4, (67, 50), 3  # sizes need not be divisible by the ranks


class Network(nn.Module):
    """A plain module with a residual, a stride and channel attention; no code for ranks."""

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
    """Forward and backward; the same code for split and whole images."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss


def gradient_difference(model: nn.Module, other: nn.Module) -> float:
    """Largest absolute difference of the gradients of two networks."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)


def main() -> None:
    ranks = MPI.COMM_WORLD.size
    mesh = spatialdl.init_mesh(grid=(ranks, 1))
    torch.manual_seed(0)  # the same weights and images on every rank
    model = Network().double()
    reference = copy.deepcopy(model)  # runs on whole images, on every rank
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    images = torch.randn(IMAGES, 3, *SIZE, dtype=torch.float64)
    labels = torch.arange(IMAGES) % CLASSES
    if mesh.comm.rank == 0:
        print(f"images of {SIZE[0]}x{SIZE[1]} pixels in {ranks}x1 tiles, one a rank")
        print("step    loss   difference of loss   of gradients")
    for step in range(STEPS):
        loss = train_step(model, optimizers[0], spatialdl.shard(images, mesh), labels)
        spatialdl.average_gradients(model, mesh)  # the only line for ranks
        expected = train_step(reference, optimizers[1], images, labels)
        differences = abs(loss - expected).item(), gradient_difference(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        if mesh.comm.rank == 0:
            print(f"{step:4} {loss.item():7.4f} {differences[0]:20.1e} {differences[1]:14.1e}")


if __name__ == "__main__":
    main()
