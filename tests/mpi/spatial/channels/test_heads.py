from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatialdl
from spatialdl.layout.partition import Partition
from spatialdl.spatial.channels.tensor import all_channels
from spatialdl.spatial.channels.weights import Weight  # noqa: F401  (registers all operations)
from spatialdl.spatial.random import keyed
from tests.mpi.device import DEVICE
from tests.mpi.spatial.channels.divided import WORLD, assert_as_whole, channels, drawn, within

RANKS = WORLD.size
HEADS = RANKS + 1
SAMPLES, ROWS, COLUMNS, SIZE = 2, 5, 6, 4


# --- attention of one layer that gives queries, keys and values


def attend(x: Tensor) -> Tensor:
    """As transformers write it."""
    samples, tokens, size = x.shape
    q, k, v = x.reshape(samples, tokens, 3, HEADS, size // 3 // HEADS).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(samples, tokens, size // 3)


def attend_fused(x: Tensor) -> Tensor:
    heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in x.chunk(3, -1)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def attend_with_heads_in_samples(x: Tensor) -> Tensor:
    """As `F.multi_head_attention_forward` does: heads and samples are one dim of a batch."""
    tokens, samples, size = x.shape
    q, k, v = x.unflatten(-1, (3, size // 3)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    rows = [one.reshape(tokens, samples * HEADS, -1).transpose(0, 1) for one in (q, k, v)]
    found = torch.bmm(torch.bmm(rows[0], rows[1].transpose(1, 2)).softmax(-1), rows[2])
    return found.transpose(0, 1).reshape(tokens * samples, size // 3)


@pytest.mark.parametrize(
    ("attention", "shape"),
    [
        (within(attend), (2, 5)),
        (within(attend_fused), (2, 5)),
        (attend_with_heads_in_samples, (5, 2)),
    ],
)
def test_ranks_have_heads_of_their_own(attention: Any, shape: tuple[int, int]):
    size = 3 * HEADS * 4
    partition = Partition.even(size, RANKS, unit=4, pieces=3)
    assert_as_whole(attention, drawn(*shape, size), at=2, partition=partition)


# --- masks


MASKS = {
    "rows and columns": (ROWS, COLUMNS),
    "samples, one head, one row": (SAMPLES, 1, 1, COLUMNS),
    "samples and heads": (SAMPLES, HEADS, ROWS, COLUMNS),
}


def mask_of(shape: tuple[int, ...], is_bool: bool) -> Tensor:
    mask = drawn(*shape, seed=5)
    if is_bool:
        mask = mask > -0.5
        mask[..., 0] = True
    return mask


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q * SIZE**-0.5, k.transpose(-2, -1))
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    return torch.matmul(scores.softmax(dim=-1), v)


def features() -> list[Tensor]:
    sizes = (ROWS, COLUMNS, COLUMNS)
    return [drawn(SAMPLES, HEADS, n, SIZE, seed=at) for at, n in enumerate(sizes)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_of_any_shape_go_to_the_heads_that_a_rank_has(shape: str, fused: bool):
    """Of a mask that is trained for all heads each rank has a part of the gradient."""
    attention: Any = F.scaled_dot_product_attention if fused else spelled_out

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask_of(MASKS[shape], True).to(q.device))

    assert_as_whole(within(masked), *features())
    grads = []
    for divided in (False, True):
        mask = mask_of(MASKS[shape], False).to(DEVICE if divided else "cpu").requires_grad_()
        q, k, v = (channels(one) if divided else one for one in features())
        y = all_channels(within(attention)(q, k, v, mask))
        (y * drawn(*y.shape, seed=7).to(y.device)).sum().backward()
        grads += [(mask.grad.cpu(), y.detach().cpu())]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-12)


def unseen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What sees nothing is zero."""
    mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool, device=q.device)
    mask[1] = False
    return F.scaled_dot_product_attention(q, k, v, mask)


OTHERS: dict[str, Any] = {
    "a mask that is divided": F.scaled_dot_product_attention,
    "unseen": unseen,
    "own groups": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_by_themselves(name: str):
    mask = [drawn(1, HEADS, ROWS, COLUMNS)] if "divided" in name else []
    assert_as_whole(within(OTHERS[name]), *features(), *mask)


def test_shared_heads_get_all_channels():
    def attention(q: Tensor) -> Tensor:
        k = q.reshape(SAMPLES, -1, 2, ROWS, SIZE).sum(2)
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    assert_as_whole(attention, drawn(SAMPLES, 2 * HEADS, ROWS, SIZE))


# --- dropout


@pytest.mark.parametrize(
    ("mask", "causal"), [(None, False), (None, True), *((name, False) for name in MASKS)]
)
def test_dropout_of_weights_drops_what_one_process_drops(mask: str | None, causal: bool):
    given = None if mask is None else mask_of(MASKS[mask], True)

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = None if given is None else given.to(q.device)
        with keyed(1, 2):
            return F.scaled_dot_product_attention(q, k, v, own, 0.4, causal)

    assert_as_whole(within(dropped), *features())


def test_what_is_no_probability_is_refused():
    q, k, v = map(channels, features())
    with pytest.raises(ValueError, match="dropout probability"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=1.5)


# --- PyTorch's module


MODULE_MASKS = {
    "none": {},
    "3-D and padding": {
        "attn_mask": (SAMPLES * HEADS, ROWS, ROWS),
        "key_padding_mask": (SAMPLES, ROWS),
    },
}


class Attends(nn.Module):
    def __init__(self, need_weights: bool, masks: dict[str, Tensor], averages: bool) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.attention = nn.MultiheadAttention(width, HEADS, dropout=0.2, batch_first=True)
        self.need_weights, self.masks, self.averages = need_weights, masks, averages

    def forward(self, x: Tensor) -> Any:
        masks = {name: mask.to(x.device) for name, mask in self.masks.items()}
        options = {"need_weights": self.need_weights, "average_attn_weights": self.averages}
        y, weights = self.attention(x, x, x, **masks, **options)
        return y if weights is None else y.mean() + weights.square().sum()


@pytest.mark.parametrize(("is_bool", "need_weights"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("masks", MODULE_MASKS)
def test_modules_of_pytorch_take_their_masks(masks: str, is_bool: bool, need_weights: bool):
    given = {name: mask_of(shape, is_bool) for name, shape in MODULE_MASKS[masks].items()}
    if is_bool:  # True is what is not seen, there
        given = {name: ~mask for name, mask in given.items()}
    torch.manual_seed(3)
    plain = Attends(need_weights, given, averages=is_bool).double()
    mesh = spatialdl.init_mesh((1, 1), tensor=RANKS)
    network = Attends(need_weights, given, averages=is_bool).double()
    network.load_state_dict(plain.state_dict())
    model = spatialdl.SpatialParallel(network.to(DEVICE), mesh)
    x = drawn(SAMPLES, ROWS, HEADS * SIZE)
    for step in range(2):
        with keyed(1, step):
            wanted = plain(x)
        with keyed(1, step):
            found = model(x.to(DEVICE))
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-12)
    for one in (found, wanted):
        one.square().sum().backward()
    grads = {name: one.grad for name, one in plain.named_parameters()}
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.grad)
    state = spatialdl.full_state_dict(model, mesh)
    for name, grad in grads.items():
        torch.testing.assert_close(state[name].cpu(), grad, rtol=0, atol=1e-11)
