"""Networks in SpatialParallel on a tensor axis equal one process, over several optimizer steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.models.amoebanet import amoebanet_d
from spatialdl.models.resnet import resnet18, resnet50
from spatialdl.models.resnet_v2 import resnet110_v2
from spatialdl.models.unet import unet, unet3d
from spatialdl.models.vit import VisionTransformer
from spatialdl.random import keyed
from tests.mpi.channels.divided import WORLD
from tests.mpi.device import DEVICE

# tensor, grid, data
LAYOUTS = {
    2: [(2, (1, 1), 1)],
    3: [(3, (1, 1), 1)],
    4: [(4, (1, 1), 1), (2, (2, 1), 1), (2, (1, 1), 2)],
}


class Head(nn.Module):
    """As VGG-16's: dense layers over a flattened map, with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(16, 20, 3, padding=1), nn.ReLU(True), nn.AdaptiveAvgPool2d((7, 7)),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(20 * 49, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class Encoder(nn.Module):
    """PyTorch's own transformer layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.1, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, squeeze and excitation, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 1)
        self.depthwise = nn.Conv2d(24, 24, 5, padding=2, groups=24, bias=False)
        self.squeeze, self.excite = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)
        self.grouped = nn.Conv2d(24, 16, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(8, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 9, 2, 2), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.silu(self.wide(self.stem(x)))))
        weights = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        y = self.up(F.gelu(self.norm(self.grouped(y * weights))))
        return self.out(torch.cat([y, x], 1)).mean((2, 3))


Network = tuple[Callable[[], nn.Module], tuple[int, ...]]
NETWORKS: dict[str, Network] = {
    "resnet18": (lambda: resnet18(5, width=8), (3, 65, 57)),
    "resnet50": (lambda: resnet50(5, width=8), (3, 65, 57)),
    "resnet110_v2": (lambda: resnet110_v2(5, width=6), (3, 33, 17)),
    "amoebanet_d": (lambda: amoebanet_d(5, layers=3, filters=16), (3, 64, 48)),
    "unet": (lambda: unet(5, width=6, depth=3), (3, 45, 37)),
    "unet3d": (lambda: unet3d(5, width=5, depth=2), (1, 17, 13, 11)),
    "vit": (lambda: VisionTransformer(5, patch=8, width=24, depth=2, heads=4), (3, 40, 32)),
    "head": (Head, (3, 40, 34)),
    "encoder": (Encoder, (3, 40, 32)),
    "mobile": (Mobile, (3, 36, 30)),
}


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(2).mean(2) if y.dim() > 2 else y, labels)


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_one_process(name: str, recompute: bool):
    """Loss, weights and buffers; each rank has its share of the weights, of any layout."""
    if recompute and name not in ("resnet18", "vit", "encoder"):
        pytest.skip("three of them run again in backward")
    make, shape = NETWORKS[name]
    for tensor, tiles, data in LAYOUTS[WORLD.size]:
        grid = (*tiles, *(1,) * (len(shape) - 3))
        torch.manual_seed(7)
        plain = make().double()
        network = copy.deepcopy(plain)
        if recompute:
            spatialdl.recompute_blocks(network)
        mesh = spatialdl.init_mesh(grid, data, tensor=tensor)
        model = spatialdl.SpatialParallel(network.to(DEVICE), mesh)
        images = torch.randn(2, *shape, dtype=torch.float64)
        labels = torch.tensor([1, 3])
        optimizers = [torch.optim.SGD(one.parameters(), 1e-3, 0.9) for one in (model, plain)]
        for step in range(3):
            with keyed(0, step):
                x = spatialdl.shard(images.to(DEVICE), mesh)
                loss = loss_of(model(x), labels.to(DEVICE))
                loss.backward()
            with keyed(0, step):
                expected = loss_of(plain(images), labels)
                expected.backward()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = spatialdl.full_state_dict(model, mesh)
        for key, one in plain.state_dict().items():
            torch.testing.assert_close(found[key].cpu(), one, rtol=1e-9, atol=1e-10)
        held = sum(one.numel() for one in model.parameters())
        whole = sum(one.numel() for one in plain.parameters())
        assert held < whole / tensor * 1.15 + 200


@pytest.mark.world(2, 3, 4)
def test_evaluation_and_conversion():
    torch.manual_seed(7)
    plain = resnet18(5, width=8).double()
    mesh = spatialdl.init_mesh((1, 1), tensor=WORLD.size)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain).to(DEVICE), mesh)
    x = torch.randn(1, 3, 33, 33, dtype=torch.float64)
    for one in (model, plain):
        one.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x.to(DEVICE)).cpu(), plain(x), rtol=0, atol=1e-12)
        model.float()
        assert model(x.float().to(DEVICE)).dtype == torch.float32


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_gradients_are_clipped_by_the_norm_of_the_whole_network(norm_type: float):
    """The norm of a rank's part is smaller, and another one on each rank."""
    torch.manual_seed(7)
    plain = VisionTransformer(5, patch=8, width=24, depth=1, heads=4).double()
    mesh = spatialdl.init_mesh((1, 1), tensor=WORLD.size)
    model = spatialdl.SpatialParallel(copy.deepcopy(plain).to(DEVICE), mesh)
    x, labels = torch.randn(1, 3, 16, 24, dtype=torch.float64), torch.tensor([2])
    loss_of(model(x.to(DEVICE)), labels.to(DEVICE)).backward()
    loss_of(plain(x), labels).backward()
    found = spatialdl.clip_grad_norm_(model, mesh, 0.1, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert model.module.head.bias.part.grad.norm() < plain.head.bias.grad.norm() + 1e-12
    again = spatialdl.clip_grad_norm_(model, mesh, 1e9, norm_type)
    assert again.item() == pytest.approx(0.1, rel=1e-5)
