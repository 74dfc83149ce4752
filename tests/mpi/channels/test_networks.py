"""Networks in SpatialParallel on a tensor axis equal one process, over several optimizer steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import spatialdl
from spatialdl.channels import tensor
from spatialdl.models.resnet import resnet18
from spatialdl.models.vit import VisionTransformer
from spatialdl.random import keyed
from tests.mpi.channels.divided import WORLD
from tests.mpi.channels.networks import NETWORKS, Tokens
from tests.mpi.device import DEVICE

DEEP = ("amoebanet_d", "resnet110_v2", "resnet50", "vgg16_bn", "swin, spelled out")
AGAIN = ("tokens", "encoder", "resnet18", "swin")
"""Deep networks, and most of those that run again in backward, are left to the longer proof."""

STEPS = [
    pytest.param(name, again, marks=pytest.mark.slow if name in slow else ())
    for again, names, slow in ((False, NETWORKS, DEEP), (True, AGAIN, AGAIN[2:]))
    for name in names
]

MIXED = ("amoebanet_d", "mobile")
"""Tensors meet in them that are divided otherwise, or too small for all ranks."""

# tensor, grid, data
LAYOUTS = {
    2: [(2, (1, 1), 1)],
    3: [(3, (1, 1), 1)],
    4: [(4, (1, 1), 1), (2, (2, 1), 1), (2, (1, 1), 2)],
}


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(2).mean(2) if y.dim() > 2 else y, labels)


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize(("name", "recompute"), STEPS)
def test_steps_are_those_of_one_process(name: str, recompute: bool):
    """Loss, weights and buffers; each rank has its share of the weights, of any layout."""
    make, shape = NETWORKS[name]
    for ranks, tiles, data in LAYOUTS[WORLD.size]:
        grid = (*tiles, *(1,) * (len(shape) - 3))
        torch.manual_seed(7)
        plain = make().double()
        network = copy.deepcopy(plain)
        if recompute:
            spatialdl.recompute_blocks(network)
        mesh = spatialdl.init_mesh(grid, data, tensor=ranks)
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
        assert held < whole / ranks * 1.15 + 200


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in MIXED])
def test_activations_stay_divided(name: str, monkeypatch: pytest.MonkeyPatch):
    """Layers with weights ask for channels as they need them; what is between them does not."""
    gathers: list[str] = []

    def listed(name: str) -> None:
        real = getattr(tensor, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if name == "on_all_channels" or args[4]:
                gathers.append(f"{name} {args[0] if callable(args[0]) else args[0].shape}")
            return real(*args, **kwargs)

        monkeypatch.setattr(tensor, name, called)

    make, shape = NETWORKS[name]
    torch.manual_seed(7)
    mesh = spatialdl.init_mesh((1,) * (len(shape) - 1), tensor=WORLD.size)
    model = spatialdl.SpatialParallel(make().to(DEVICE), mesh)
    x = torch.randn(2, *shape, device=DEVICE)
    with torch.no_grad():
        model(x)
        listed("on_all_channels")
        listed("gathered")
        with keyed(0, 0):
            model.module(spatialdl.shard(x, mesh))
    assert gathers == []


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


@pytest.mark.world(2, 3)
def test_a_transformer_keeps_its_share_of_positions_and_tokens_too():
    """Of a ViT-S/16; on more ranks some have a head more than others."""
    torch.manual_seed(7)
    plain = Tokens(width=384, heads=6, depth=12, patch=16, grid=(14, 14)).eval()
    whole = sum(one.numel() for one in plain.parameters())
    model = spatialdl.SpatialParallel(plain, spatialdl.init_mesh((1, 1), tensor=WORLD.size))
    with torch.no_grad():
        model.to(DEVICE)(torch.randn(1, 3, 224, 224, device=DEVICE))
    held = sum(one.numel() for one in model.parameters())
    assert held == pytest.approx(whole / WORLD.size, rel=0.02)
    assert model.module.pos_embed.part.shape == (1, 197, 384 // WORLD.size)
    assert model.module.cls_token.part.shape == (1, 1, 384 // WORLD.size)
