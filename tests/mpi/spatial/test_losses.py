"""Losses of split images against one process in float64: values and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import SpatialTensor, shard
from tests.mpi.equality import Operation, check, check_keyed, close, drawn
from tests.mpi.spatial.shared import Cases

CLASSES = 4
SIZES = {"mean": (11, 7), "sum": (4, 4), "none": (7, 9)}
"""By reduction; one pixel a rank, too."""


def image(seed: int, *size: int) -> Tensor:
    return drawn(seed, 2, CLASSES, *size)


def labels(size: tuple[int, int], ignored: int = -100) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    classes = torch.randint(CLASSES, (2, *size), generator=draw)
    return classes.masked_fill(torch.rand(classes.shape, generator=draw) < 0.3, ignored)


def whole_or_split(target: Tensor, split: bool, x: Tensor) -> Tensor:
    target = target.to(x.device)
    return shard(target, x.mesh) if split and isinstance(x, SpatialTensor) else target


WEIGHT = torch.tensor([0.5, 1.5, 2.0, 0.1], dtype=torch.float64)


def likelihood(x: Tensor, *others: object, **options: object) -> Tensor:
    return F.nll_loss(x.log_softmax(1), *others, **options)


OVER_CLASSES: dict[str, tuple[Operation, bool, dict]] = {
    "cross_entropy": (F.cross_entropy, False, {}),
    "cross_entropy, all": (F.cross_entropy, True, {"label_smoothing": 0.1, "ignore_index": 2}),
    "nll_loss": (likelihood, False, {}),
    "nll_loss, ignored": (likelihood, False, {"ignore_index": 2}),
    "of probabilities": (F.cross_entropy, True, {"label_smoothing": 0.1}),
}
"""Losses, whether their classes have weights, and options."""


@pytest.mark.tiles
@pytest.mark.parametrize("reduction", SIZES)
@pytest.mark.parametrize("name", OVER_CLASSES)
def test_over_classes(name: str, reduction: str, meshes: dict) -> None:
    """The target is split as the image, or whole where the sum is taken."""
    (function, weighted, options), size = OVER_CLASSES[name], SIZES[reduction]
    target = labels(size, options.get("ignore_index", -100))
    target = image(2, *size).softmax(1) if name == "of probabilities" else target

    def loss(x: Tensor) -> Tensor:
        split = whole_or_split(target, reduction != "sum", x)
        weight = WEIGHT.to(x.device) if weighted else None
        return function(x, split, weight, reduction=reduction, **options)

    check(loss, image(1, *size), [], meshes, f"{name} {size}")


def of(loss: Operation, one: Operation, other: Operation, **options: object) -> Operation:
    """A loss of functions of output and target."""
    return lambda x, t, reduction: loss(one(x), other(t), reduction=reduction, **options)


def beside(loss: Operation, name: str, **options: object) -> Operation:
    """A loss with a tensor for each class, by this name."""
    return lambda x, t, reduction: loss(
        x.sigmoid(),
        t.sigmoid(),
        reduction=reduction,
        **{name: WEIGHT.to(x.device).view(-1, 1, 1)},
        **options,
    )


def signs(t: Tensor) -> Tensor:
    return t.detach().sign()


def identity(x: Tensor) -> Tensor:
    return x


logits, sigmoid = F.binary_cross_entropy_with_logits, torch.sigmoid
PIXELWISE: dict[str, Operation] = {
    "smooth_l1_loss": partial(F.smooth_l1_loss, beta=0.5),
    "binary_cross_entropy, weight": beside(F.binary_cross_entropy, "weight"),
    "with_logits, pos_weight": beside(logits, "pos_weight"),
    "kl_div": of(F.kl_div, lambda x: x.log_softmax(1), lambda t: t.softmax(1)),
    "kl_div, logarithms": of(
        F.kl_div, lambda x: x.log_softmax(1), lambda t: t.log_softmax(1), log_target=True
    ),
    "soft_margin_loss": of(F.soft_margin_loss, identity, signs),
    "poisson_nll_loss": of(F.poisson_nll_loss, identity, torch.abs, full=True),
    "margin_ranking_loss": lambda x, t, reduction: F.margin_ranking_loss(
        x, x * x, signs(t), 0.3, reduction=reduction
    ),
}


@pytest.mark.tiles
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", PIXELWISE)
def test_pixelwise(name: str, split: bool, meshes: dict) -> None:
    """A target that is split has no gradient here, for `check` divides it."""
    for reduction in ("sum",) if split else ("mean", "none"):
        one, target = image(1, *SIZES[reduction]), image(2, *SIZES[reduction])

        def loss(x: Tensor, t: Tensor, reduction: str = reduction) -> Tensor:
            t = whole_or_split(t, split, x)
            return PIXELWISE[name](x, t, reduction=reduction) + 0 * t.sum()

        what = f"{name} {reduction}"
        if split:
            check(lambda x, f=loss, t=target: f(x, t), one, [], meshes, what)
        else:
            check(loss, one, [target], meshes, what)


TARGET, FEW = image(2, 11, 7), image(2, 2, 2).softmax(1)
OTHERS: dict[str, Operation] = {
    "size_average": lambda x: F.mse_loss(x, TARGET.to(x.device), size_average=False),
    "batchmean": lambda x: F.kl_div(
        x.log_softmax(1), TARGET.to(x.device).softmax(1), reduction="batchmean"
    ),
    "turned round": lambda x: F.mse_loss(TARGET.to(x.device), x),
    "tokens": lambda x: F.cross_entropy(x.flatten(2), labels((11, 7)).flatten(1).to(x.device)),
}
OF_FEW: dict[str, Operation] = {
    "classes": lambda x: F.cross_entropy(
        x, labels((2, 2)).to(x.device), WEIGHT.to(x.device), label_smoothing=0.1
    ),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, FEW.to(x.device)),
}
CASES: Cases = {
    **{name: (loss, (2, CLASSES, 11, 7), []) for name, loss in OTHERS.items()},
    **{
        f"{name} where ranks have no pixels": (
            lambda x, f=loss: f(F.max_pool2d(x, 4)),
            (2, CLASSES, 9, 8),
            [],
        )
        for name, loss in OF_FEW.items()
    },
}


@pytest.mark.tiles
@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", CASES)
def test_others(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


def test_one_hot_maps(meshes: dict) -> None:
    target = labels((11, 7), 0)
    expected = F.one_hot(target, CLASSES)
    for mesh in meshes.values():
        split = shard(target, mesh)
        for hot in (F.one_hot(split), F.one_hot(split, CLASSES)):
            assert torch.equal(hot.full_tensor(), expected)
        zeros = torch.zeros(2, CLASSES, 11, 7)
        hot = zeros.scatter_(1, shard(target[:, None], mesh), 1)
        assert torch.equal(hot.full_tensor(), expected.permute(0, 3, 1, 2).float())
        assert zeros.numel() == 0  # nobody can take it for the one-hot map
        x = shard(image(1, 11, 7), mesh)
        picked = x.gather(1, shard(target[:, None], mesh))
        plain = image(1, 11, 7).gather(1, target[:, None])
        assert torch.equal(picked.full_tensor(), plain)
        x.scatter_(1, target[:, None], 2.0)
        close(
            x.full_tensor(),
            image(1, 11, 7).scatter(1, target[:, None], 2.0),
            "scatter_",
        )


FULL: list[Operation] = [
    lambda x, few, shares: F.cross_entropy(x, few, WEIGHT.to(x.device), ignore_index=2),
    lambda x, few, shares: F.cross_entropy(x, few, ignore_index=2, reduction="sum"),
    lambda x, few, shares: F.cross_entropy(x, few, WEIGHT.to(x.device), reduction="none"),
    lambda x, few, shares: F.cross_entropy(x, shares, label_smoothing=0.1),
    lambda x, few, shares: F.nll_loss(x.log_softmax(1), few, ignore_index=2),
    lambda x, few, shares: F.mse_loss(x, shares),
]


@pytest.mark.tiles
@pytest.mark.parametrize("number", range(len(FULL)))
def test_full_outputs_with_split_targets(number: int, meshes: dict) -> None:
    """As after `gather_before`; parameters behind it get their gradients on average."""
    size = (11, 7) if number % 2 else (4, 4)
    targets = [labels(size, -100 if number == 2 else 2), image(4, *size).softmax(1)]

    def operation(x: Tensor, bias: Tensor) -> Tensor:
        chosen = [whole_or_split(one, True, x) for one in targets]
        full = x.full_tensor() if isinstance(x, SpatialTensor) else x
        return FULL[number](full + bias, *chosen)

    what = f"loss {number} of {size}"
    check(operation, image(1, *size), [drawn(3, CLASSES, 1, 1)], meshes, what)
