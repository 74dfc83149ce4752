from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from spatialdl.models import VisionTransformer, vit
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.recording import Forward
from tests.pipeline.cutting import run_stages

TINY = {"num_classes": 3, "patch": 4, "width": 12, "depth": 2, "heads": 3}


@pytest.mark.parametrize(
    ("pool", "registers", "size"),
    [("class", 0, (4, 4)), ("class", 3, (20, 12)), ("mean", 0, (20, 12)), ("mean", 3, (8, 8))],
)
def test_images_of_any_size_that_the_patch_divides(pool, registers, size):
    network = vit(**TINY, in_channels=2, pool=pool, registers=registers)
    assert network(torch.rand(2, 2, *size)).shape == (2, 3)
    tokens = {name: tuple(p.shape) for name, p in network.named_parameters() if "token" in name}
    assert tokens == {
        **({"cls_token": (1, 1, 12)} if pool == "class" else {}),
        **({"reg_token": (1, registers, 12)} if registers else {}),
    }


def test_signals_and_volumes():
    for size in ((16,), (4, 8, 12)):
        assert vit(**TINY, dims=len(size))(torch.rand(2, 3, *size)).shape == (2, 3)


def test_a_patch_that_does_not_divide_the_image_is_refused():
    with pytest.raises(ValueError, match=r"patches of 4 .* 8 x 10: crop or pad"):
        vit(**TINY)(torch.rand(1, 3, 8, 10))


def test_positions_are_those_of_the_plain_baseline():
    """`posemb_sincos_2d` of big_vision, columns first."""
    rows, columns, width = 5, 7, 24
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    omega = torch.arange(width // 4) / (width // 4 - 1)
    omega = 1.0 / (10_000**omega)
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega
    expected = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1)

    embedding = vit(width=width, heads=3, patch=4).patch_embed
    nn.init.zeros_(embedding.proj.weight)
    tokens = embedding(torch.zeros(1, 3, 4 * rows, 4 * columns))
    torch.testing.assert_close(tokens[0], expected)


def test_positions_of_a_network_of_float64_are_of_float64():
    """Float32 sines differ in the last digit between devices, which changed losses by 1e-10."""
    embedding = vit(width=24, heads=3, patch=4).double().patch_embed
    found = embedding.positions(1, 9, torch.device("cpu"))
    slowest = torch.arange(9, dtype=torch.float64) / 10_000
    torch.testing.assert_close(found[5].flatten(), slowest.sin(), rtol=1e-14, atol=0)
    assert embedding.to(torch.bfloat16).positions(1, 9, torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize(("size", "width"), [((3, 4), 12), ((2, 3, 4), 12), ((5,), 2)])
def test_every_place_has_another_position(size, width):
    embedding = vit(width=width, heads=1, patch=2, dims=len(size)).patch_embed
    nn.init.zeros_(embedding.proj.weight)
    tokens = embedding(torch.zeros(1, 3, *(2 * n for n in size)))[0]
    distances = torch.cdist(tokens, tokens) + torch.eye(len(tokens))
    assert distances.min() > 0.05
    norms = tokens.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(width / 2)))


def plain(network: VisionTransformer, x: Tensor) -> Tensor:
    """The same with PyTorch's own layers."""
    x = network.patch_embed(x)
    names = [name for name in ("cls_token", "reg_token") if hasattr(network, name)]
    tokens = [getattr(network, name).expand(len(x), -1, -1) for name in names]
    x = torch.cat([*tokens, x], 1)
    for block in network.blocks:
        width, heads = block.norm1.normalized_shape[0], block.attn.heads
        layer = nn.TransformerEncoderLayer(
            *(width, heads, block.mlp.fc1.out_features, 0.0, "gelu", 1e-6),
            batch_first=True,
            norm_first=True,
        ).to(x)
        state = block.state_dict()
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": state["attn.qkv.weight"],
                "self_attn.in_proj_bias": state["attn.qkv.bias"],
                "self_attn.out_proj.weight": state["attn.proj.weight"],
                "self_attn.out_proj.bias": state["attn.proj.bias"],
                **{f"linear{n}.{k}": state[f"mlp.fc{n}.{k}"] for n in "12" for k in KINDS},
                **{f"norm{n}.{k}": state[f"norm{n}.{k}"] for n in "12" for k in KINDS},
            }
        )
        x = layer(x)
    x = network.norm(x)
    beside = sum(token.shape[1] for token in tokens)
    return network.head(x[:, 0] if network.pool == "class" else x[:, beside:].mean(1))


KINDS = ("weight", "bias")


@pytest.mark.parametrize(("pool", "registers"), [("class", 2), ("mean", 3)])
def test_its_blocks_are_pytorchs_encoder_layers(pool, registers):
    torch.manual_seed(0)
    network = vit(**TINY, pool=pool, registers=registers).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.rand(2, 3, 12, 20, dtype=torch.float64)
    torch.testing.assert_close(network(images), plain(network, images))


def test_linear_layers_begin_small_and_without_biases():
    torch.manual_seed(0)
    network = vit()
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() > 1 and "patch_embed" not in name:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.15), name
    weight = network.patch_embed.proj.weight
    assert float(weight.detach().std()) == pytest.approx((3 * 16 * 16) ** -0.5, rel=0.1)


def test_a_pipeline_cuts_between_blocks():
    network = vit(**{**TINY, "depth": 6}, registers=2)
    steps = Forward(network, (3, 32, 32)).of(2, training=True).steps
    assert [f"blocks.{n}" for n in range(6)] == [s.path for s in steps if "blocks" in s.path]
    stages = cut(network, (1, 1, 1), image_size=(3, 32, 32))
    blocks = [{name.split(".")[1] for name in s.state_dict() if "blocks" in name} for s in stages]
    assert sorted(map(len, blocks)) == [2, 2, 2]
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(run_stages(stages, images), network(images))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dims": 4}, "1 to 3 dims, got dims=4"),
        ({"pool": "max"}, 'pool must be "class" or "mean", got "max"'),
        ({"depth": 0}, "depth=0"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"registers": -1}, "registers=-1"),
        ({"heads": 5}, "width=384 must be a multiple of heads=5"),
        ({"width": 10, "heads": 5}, "width=10 must be a multiple of heads=5 and of 4"),
        ({"mlp_ratio": 0}, "mlp_ratio=0"),
    ],
)
def test_what_cannot_be_built_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        vit(**wrong)
