"""Losses of split images against one process in float64: values and gradients."""

from __future__ import annotations

import random
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, SpatialTensor, UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, close, every_mesh, parameter

CLASSES = 4
SIZES = [(11, 7), (4, 4)]


def image(seed: int, *shape: int) -> Tensor:
    return parameter(random.Random(seed), *shape)


def labels(size: tuple[int, int], ignored: int = -100) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    classes = torch.randint(CLASSES, (2, *size), generator=draw)
    return classes.masked_fill(torch.rand(classes.shape, generator=draw) < 0.3, ignored)


def whole_or_split(target: Tensor, mesh: Mesh, split: bool, x: Tensor) -> Tensor:
    target = target.to(x.device)
    return shard(target, mesh) if split and isinstance(x, SpatialTensor) else target


def beside(options: dict, x: Tensor) -> dict:
    """Options whose tensors lie where the image does."""
    return {k: v.to(x.device) if isinstance(v, Tensor) else v for k, v in options.items()}


WEIGHT = torch.tensor([0.5, 1.5, 2.0, 0.1], dtype=torch.float64)
OVER_CLASSES = {
    "cross_entropy": {},
    "cross_entropy, weights": {"weight": WEIGHT},
    "cross_entropy, smooth": {"label_smoothing": 0.2},
    "cross_entropy, all": {"label_smoothing": 0.1, "weight": WEIGHT, "ignore_index": 2},
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OVER_CLASSES)
def test_cross_entropy(name: str, reduction: str, split: bool, meshes: dict) -> None:
    options = OVER_CLASSES[name]
    for mesh in meshes.values():
        for size in SIZES:
            target = labels(size, options.get("ignore_index", -100))

            def loss(x: Tensor, mesh: Mesh = mesh, target: Tensor = target) -> Tensor:
                chosen = whole_or_split(target, mesh, split, x)
                return F.cross_entropy(x, chosen, reduction=reduction, **beside(options, x))

            check(loss, image(1, 2, CLASSES, *size), [], mesh, f"{name} {size} on {mesh.grid}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("split", [False, True])
def test_cross_entropy_of_probabilities(split: bool, reduction: str, meshes: dict) -> None:
    for mesh in meshes.values():
        for size in SIZES:
            target = image(2, 2, CLASSES, *size).softmax(1)

            def loss(x: Tensor, mesh: Mesh = mesh, target: Tensor = target) -> Tensor:
                chosen = whole_or_split(target, mesh, split, x)
                weight = WEIGHT.to(x.device)
                return F.cross_entropy(x, chosen, weight, reduction=reduction, label_smoothing=0.1)

            check(loss, image(1, 2, CLASSES, *size), [], mesh, f"{size} on {mesh.grid}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"ignore_index": 1}], ids=str)
def test_nll_loss(options: dict, reduction: str, meshes: dict) -> None:
    for mesh in meshes.values():
        target = labels((11, 7), options.get("ignore_index", -100))
        check(
            lambda x, t=target: F.nll_loss(
                x.log_softmax(1), t.to(x.device), reduction=reduction, **beside(options, x)
            ),
            image(1, 2, CLASSES, 11, 7),
            [],
            mesh,
            f"nll_loss on {mesh.grid}",
        )


PIXELWISE: dict[str, Operation] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.5),
    "smooth_l1_loss, beta 0": lambda x, t, reduction: F.smooth_l1_loss(
        x, t, reduction=reduction, beta=0.0
    ),
    "huber_loss": lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.7),
    "binary_cross_entropy": lambda x, t, reduction: F.binary_cross_entropy(
        x.sigmoid(), t.sigmoid(), reduction=reduction
    ),
    "binary_cross_entropy, weight": lambda x, t, reduction: F.binary_cross_entropy(
        x.sigmoid(), t.sigmoid(), WEIGHT.to(x.device).view(-1, 1, 1), reduction=reduction
    ),
    "with_logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(
        x, t.sigmoid(), reduction=reduction
    ),
    "with_logits, pos_weight": lambda x, t, reduction: F.binary_cross_entropy_with_logits(
        x, t.sigmoid(), pos_weight=WEIGHT.to(x.device).view(-1, 1, 1), reduction=reduction
    ),
    "kl_div": lambda x, t, reduction: F.kl_div(x.log_softmax(1), t.softmax(1), reduction=reduction),
    "kl_div, logarithms": lambda x, t, reduction: F.kl_div(
        x.log_softmax(1), t.log_softmax(1), reduction=reduction, log_target=True
    ),
    "soft_margin_loss": lambda x, t, reduction: F.soft_margin_loss(
        x, t.detach().sign(), reduction=reduction
    ),
    "poisson_nll_loss": lambda x, t, reduction: F.poisson_nll_loss(
        x, t.abs(), full=True, reduction=reduction
    ),
    "gaussian_nll_loss": lambda x, t, reduction: F.gaussian_nll_loss(
        x, t, t.square() + 1, reduction=reduction
    ),
    "hinge_embedding_loss": lambda x, t, reduction: F.hinge_embedding_loss(
        x, t.detach().sign(), reduction=reduction
    ),
    "margin_ranking_loss": lambda x, t, reduction: F.margin_ranking_loss(
        x, x * x, t.detach().sign(), 0.3, reduction=reduction
    ),
    "mse_loss, weight": lambda x, t, reduction: F.mse_loss(
        x, t, reduction=reduction, weight=t.square()
    ),
    "l1_loss, weight": lambda x, t, reduction: F.l1_loss(
        x, t, reduction=reduction, weight=t.square()
    ),
    "huber_loss, weight": lambda x, t, reduction: F.huber_loss(
        x, t, reduction=reduction, weight=t.square()
    ),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", PIXELWISE)
def test_pixelwise(name: str, reduction: str, split: bool, meshes: dict) -> None:
    for mesh in meshes.values():
        for size in SIZES:

            def loss(x: Tensor, t: Tensor, mesh: Mesh = mesh) -> Tensor:
                t = t.to(x.device)
                if split and isinstance(x, SpatialTensor):
                    t = shard(t, mesh)
                return PIXELWISE[name](x, t, reduction=reduction) + 0 * t.sum()

            inputs = image(1, 2, CLASSES, *size), image(2, 2, CLASSES, *size)
            if not split:
                check(loss, inputs[0], inputs[1:], mesh, f"{name} {size} on {mesh.grid}")
            else:
                target = inputs[1]
                check(
                    lambda x, t=target, loss=loss: loss(x, t),
                    inputs[0],
                    [],
                    mesh,
                    f"{name} {size} on {mesh.grid}",
                )


def test_legacy_arguments_batchmean_and_broadcast(meshes: dict) -> None:
    target = image(2, 2, CLASSES, 11, 7)
    operations: list[Operation] = [
        lambda x: F.mse_loss(x, target, size_average=False),
        lambda x: F.mse_loss(x, target, reduce=False),
        lambda x: F.kl_div(x.log_softmax(1), target.softmax(1), reduction="batchmean"),
        lambda x: F.mse_loss(x, target[:, :1]),
        lambda x: F.mse_loss(target, x),
        lambda x: nn.CrossEntropyLoss(WEIGHT)(x, labels((11, 7))),
        lambda x: nn.BCEWithLogitsLoss()(x.mean((2, 3)), target.mean((2, 3)).sigmoid()),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mesh in meshes.values():
            for number, operation in enumerate(operations):
                what = f"operation {number} on {mesh.grid}"
                check(operation, image(1, 2, CLASSES, 11, 7), [], mesh, what)


def test_where_ranks_have_no_pixels(meshes: dict) -> None:
    target, probabilities = labels((2, 2)), image(2, 2, CLASSES, 2, 2).softmax(1)
    operations: list[Operation] = [
        lambda x: F.cross_entropy(x, target, WEIGHT, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, target, reduction="none"),
        lambda x: F.cross_entropy(x, probabilities),
        lambda x: F.mse_loss(x, probabilities),
        lambda x: F.binary_cross_entropy_with_logits(x, probabilities),
    ]
    for mesh in meshes.values():
        for number, operation in enumerate(operations):
            what = f"operation {number} on {mesh.grid}"
            few = image(1, 2, CLASSES, 9, 8)
            check(lambda x, o=operation: o(F.max_pool2d(x, 4)), few, [], mesh, what)


def test_classes_at_the_end_and_tokens(meshes: dict) -> None:
    target = labels((11, 7))
    operations: list[Operation] = [
        lambda x: F.cross_entropy(x.flatten(2), target.flatten(1)),
        lambda x: F.cross_entropy(x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), target),
    ]
    for mesh in meshes.values():
        for number, operation in enumerate(operations):
            what = f"operation {number} on {mesh.grid}"
            check(operation, image(1, 2, CLASSES, 11, 7), [], mesh, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, meshes: dict) -> None:
    x, target = image(1, 2, CLASSES, 11, 7).to(dtype), image(2, 2, CLASSES, 11, 7).to(dtype)
    for reduction in ("mean", "none"):
        plain = F.cross_entropy(x.float(), labels((11, 7)), reduction=reduction)
        for mesh in meshes.values():
            ours = F.cross_entropy(shard(x, mesh), labels((11, 7)), reduction=reduction)
            assert ours.dtype == dtype
            full = ours.full_tensor() if reduction == "none" else ours
            torch.testing.assert_close(full.float(), plain, rtol=2e-2, atol=2e-2)
            assert F.mse_loss(shard(x, mesh), target).dtype == dtype


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
        x = shard(image(1, 2, CLASSES, 11, 7), mesh)
        picked = x.gather(1, shard(target[:, None], mesh))
        plain = image(1, 2, CLASSES, 11, 7).gather(1, target[:, None])
        assert torch.equal(picked.full_tensor(), plain)
        x.scatter_(1, target[:, None], 2.0)
        close(
            x.full_tensor(),
            image(1, 2, CLASSES, 11, 7).scatter(1, target[:, None], 2.0),
            "scatter_",
        )
        with pytest.raises(UnsupportedSpatialOp, match="dim 2 is split"):
            x.gather(2, target[:, None])


def monai_losses() -> dict[str, Operation]:
    losses = pytest.importorskip("monai.losses")
    return {
        "Dice": losses.DiceLoss(to_onehot_y=True, softmax=True),
        "Dice, no background": losses.DiceLoss(
            include_background=False, to_onehot_y=True, softmax=True, squared_pred=True
        ),
        "Dice, batch": losses.DiceLoss(to_onehot_y=True, softmax=True, batch=True, jaccard=True),
        "Dice, sum": losses.DiceLoss(to_onehot_y=True, sigmoid=True, reduction="sum"),
        "DiceCE": losses.DiceCELoss(to_onehot_y=True, softmax=True),
        "GeneralizedDice": losses.GeneralizedDiceLoss(to_onehot_y=True, softmax=True),
        "Tversky": losses.TverskyLoss(to_onehot_y=True, softmax=True),
    }


@pytest.mark.parametrize("split", [False, True])
def test_dice_from_monai(split: bool, meshes: dict) -> None:
    target = labels((11, 7), 0)[:, None]
    for name, loss in monai_losses().items():
        for mesh in meshes.values():

            def operation(x: Tensor, mesh: Mesh = mesh, loss: Operation = loss) -> Tensor:
                return loss(x, whole_or_split(target, mesh, split, x))

            what = f"{name} on {mesh.grid}"
            check(operation, image(1, 2, CLASSES, 11, 7), [], mesh, what)


def test_full_outputs_with_split_targets(meshes: dict) -> None:
    """As after `gather_before`; parameters behind it get their gradients on average."""
    bias = image(3, CLASSES, 1, 1)
    losses: list[Operation] = [
        lambda x, few, shares: F.cross_entropy(x, few, WEIGHT, ignore_index=2),
        lambda x, few, shares: F.cross_entropy(x, few, ignore_index=2, reduction="sum"),
        lambda x, few, shares: F.cross_entropy(x, few, WEIGHT, reduction="none"),
        lambda x, few, shares: F.cross_entropy(x, shares, label_smoothing=0.1),
        lambda x, few, shares: F.nll_loss(x.log_softmax(1), few, ignore_index=2),
        lambda x, few, shares: F.mse_loss(x, shares),
    ]
    for mesh, size, (number, loss) in product(meshes.values(), SIZES, enumerate(losses)):
        ignored = -100 if number == 2 else 2
        targets = [labels(size, ignored), image(4, 2, CLASSES, *size).softmax(1)]

        def operation(
            x: Tensor,
            bias: Tensor,
            mesh: Mesh = mesh,
            loss: Operation = loss,
            targets: list[Tensor] = targets,
        ) -> Tensor:
            if not isinstance(x, SpatialTensor):
                return loss(x + bias, *targets)
            return loss(x.full_tensor() + bias, *(shard(target, mesh) for target in targets))

        what = f"loss {number} of {size} on {mesh.grid}"
        check(operation, image(1, 2, CLASSES, *size), [bias], mesh, what)


def test_focal_from_monai(meshes: dict) -> None:
    """It computes in float32."""
    losses = pytest.importorskip("monai.losses")
    target, whole = labels((11, 7), 0)[:, None], image(1, 2, CLASSES, 11, 7)
    for loss in (
        losses.FocalLoss(to_onehot_y=True, use_softmax=True),
        losses.DiceFocalLoss(to_onehot_y=True, softmax=True),
        losses.DiceFocalLoss(to_onehot_y=True, sigmoid=True),
    ):
        plain = whole.clone().requires_grad_()
        loss(plain, target).backward()
        for mesh in meshes.values():
            leaf = whole.clone().requires_grad_()
            ours = loss(shard(leaf, mesh), target)
            ours.backward()
            torch.testing.assert_close(ours, loss(plain, target), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_what_is_refused(meshes: dict) -> None:
    for mesh in meshes.values():
        x = shard(image(1, 2, CLASSES, 8, 8), mesh)
        with pytest.raises(UnsupportedSpatialOp, match="the classes in dim 1"):
            F.cross_entropy(shard(image(1, 2, 8, 8), mesh), torch.zeros(2, 8).long())
        with pytest.raises((RuntimeError, ValueError)):
            F.cross_entropy(x.full_tensor(), shard(labels((8, 7)), mesh))
        with pytest.raises((RuntimeError, ValueError)):
            F.cross_entropy(x, labels((8, 7)))


def dice(x: Tensor, classes: Tensor) -> Tensor:
    """As it is written by hand."""
    wanted = F.one_hot(classes, 4).movedim(-1, 1).to(x)
    dims = tuple(range(2, x.dim()))
    found = x.softmax(1)
    overlap, total = (found * wanted).sum(dims), found.sum(dims) + wanted.sum(dims)
    return 1 - ((2 * overlap + 1) / (total + 1)).mean()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int, split: bool) -> None:
    size = (7, 9, 6)[:dims]
    x, other = image(1, 2, 4, *size), image(2, 2, 4, *size).sigmoid()
    draw = torch.Generator().manual_seed(3)
    classes = torch.randint(4, (2, *size), generator=draw)
    weight = torch.linspace(0.5, 2, 4).double()
    kinds: dict[str, Operation] = {
        "cross entropy": lambda x, c, y: F.cross_entropy(x, c, weight, ignore_index=2),
        "smoothed, each": lambda x, c, y: F.cross_entropy(
            x, c, label_smoothing=0.1, reduction="none"
        ),
        "of probabilities": lambda x, c, y: F.cross_entropy(x, y),
        "squares": lambda x, c, y: F.mse_loss(x, y),
        "logits": lambda x, c, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y.detach()),
        "binary": lambda x, c, y: F.binary_cross_entropy(x.sigmoid(), y),
        "dice": lambda x, c, y: dice(x, c),
    }
    for mesh in every_mesh(dims).values():
        for name, loss in kinds.items():

            def operation(x: Tensor, loss: Operation = loss, mesh: Mesh = mesh) -> Tensor:
                is_split = split and isinstance(x, SpatialTensor)
                targets = [shard(t, mesh) if is_split else t for t in (classes, other)]
                return loss(x, *targets)

            check(operation, x, [], mesh, f"{name} on {mesh.grid}, split {split}")
