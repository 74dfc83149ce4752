"""Small networks whose modules keep state, modes or aliases that a cut must not lose."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Norms(nn.Module):
    """A part that is cut, and freezes its first layer whenever it is put into training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def train(self, mode: bool = True) -> Norms:
        super().train(mode)
        self.norm.eval()
        self.conv.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.conv(x)).tanh()
        return x + self.norm2(self.conv2(x)).tanh()


class NormEval(nn.Module):
    """Some of its BatchNorm layers stay in evaluation mode, as mmsegmentation's do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.part = Norms()
        self.last, self.bn2 = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def train(self, mode: bool = True) -> NormEval:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(self.bn(self.stem(x)).relu())
        return self.head(self.bn2(self.last(x)).relu().mean((2, 3)))


class Views(nn.Module):
    """Writes into a view and into a weight; two of its parts read the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 0.7))
        self.register_buffer("shift", torch.linspace(0, 1, 6).view(6, 1, 1))
        self.last, self.head = nn.Conv2d(6, 6, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        u = self.stem(x) * 1
        part = u[:, :3]
        with torch.no_grad():
            self.scale.clamp_(-0.69, 0.69)
        y = self.conv(u.tanh()).tanh() * self.scale + self.shift
        part.mul_(0.5)
        return self.head((self.last(y) * self.shift).mean((2, 3)) + u.mean((2, 3)))


class Overwriting(nn.Module):
    """A block whose activation writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv1 = nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        return x + self.conv2(self.norm(self.conv1(x)).tanh()).tanh()


class Pyramid(nn.Module):
    """Uses what its blocks have written into."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Overwriting() for _ in range(3))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.stem(x)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return self.head(torch.cat([one.mean((2, 3)) for one in maps], 1))


class Warmup(nn.Module):
    """Counts its calls, on which its share depends; its layers are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.calls = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.norm(self.conv(x)).tanh() * min(1.0, self.calls / 10)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.warmup = nn.Conv2d(3, 6, 3, stride=2, padding=1), Warmup()
        self.last, self.head = nn.Conv2d(6, 6, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.warmup(self.stem(x)).tanh()
        return self.head(self.last(x).relu().mean((2, 3)))


STATEFUL = {
    "counting": Counting,
    "views": Views,
    "pyramid": Pyramid,
    "norm_eval": NormEval,
}
