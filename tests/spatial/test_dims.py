"""Where rows and columns go when dims are regrouped: every tile by itself must know it."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from spatialdl.layout.layout import last_slices
from spatialdl.spatial.dims import (
    SpatialDims,
    from_image,
    image_dims,
    regroup,
    samples_of,
    to_image,
)

D, H, W = 6, 12, 8
IMAGE, VOLUME, SIGNAL = image_dims(2), image_dims(3), image_dims(1)

FORMS = {
    "image": ((2, 3, H, W), IMAGE),
    "map": ((H, W), IMAGE),
    "channels last": ((2, H, W, 3), SpatialDims.of(-3, -2)),
    "rows last": ((2, W, 3, H), SpatialDims.of(-1, -3)),
    "tokens": ((2, H * W, 3), SpatialDims.of(-2, -2)),
    "tokens of all samples": ((2 * H * W, 3), SpatialDims.of(-2, -2, outer=(2, 1))),
    "rows of all samples": ((2 * H, W, 3), SpatialDims.of(-3, -2, outer=(2, 1))),
    "columns of all samples": ((3, H, 2 * W), SpatialDims.of(-2, -1, outer=(1, 2))),
    "volume": ((2, 3, D, H, W), VOLUME),
    "volume, channels last": ((2, D, H, W, 3), SpatialDims.of(-4, -3, -2)),
    "tokens of a volume": ((2, D * H * W, 3), SpatialDims.of(-2, -2, -2)),
    "tokens of slices": ((2, D, H * W, 3), SpatialDims.of(-3, -2, -2)),
    "slices of all samples": ((2 * D, 3, H, W), SpatialDims.of(-4, -2, -1, outer=(2, 1, 1))),
    "signal": ((2, 3, W), SIGNAL),
    "signal, channels last": ((2, W, 3), SpatialDims.of(-2)),
    "signals of all samples": ((2 * W, 3), SpatialDims.of(-2, outer=(2,))),
}


def extents_of(dims: SpatialDims) -> tuple[int, ...]:
    return (D, H, W)[-len(dims.at) :]


PART = (slice(1, 4), slice(3, 7), slice(2, 5))


@pytest.mark.parametrize("name", FORMS)
def test_an_image_and_back(name: str) -> None:
    shape, dims = FORMS[name]
    size, count = extents_of(dims), len(dims.at)
    whole = torch.arange(prod(shape)).reshape(shape)
    image = to_image(whole, dims, size)
    assert image.shape[-count:] == size
    assert image.dim() > count
    assert samples_of(shape, dims) == image.shape[0]
    assert torch.equal(from_image(image, dims, shape), whole)
    part = image[last_slices(PART[-count:])]
    tile = from_image(part, dims, shape)
    assert tile.shape == dims.sizes(shape, part.shape[-count:])
    assert torch.equal(to_image(tile, dims, part.shape[-count:]), part)


def check_view(shape: tuple[int, ...], dims: SpatialDims, new_shape: tuple[int, ...]) -> bool:
    """A tile regrouped by itself must be the tile of the whole regrouped."""
    size = extents_of(dims)
    view = regroup(shape, new_shape, dims, size)
    if view is None:
        return False
    whole = torch.arange(prod(shape)).reshape(shape)
    steps = [n // step for n, step in zip(size, view.steps, strict=True)]
    old = [slice(n // 3 * step, n * step) for n, step in zip(steps, view.steps, strict=True)]
    new = [slice(n // 3 * more, n * more) for n, more in zip(steps, view.factors, strict=True)]
    tile = from_image(to_image(whole, dims, size)[last_slices(old)], dims, shape)
    extents = [part.stop - part.start for part in new]
    ours = tile.reshape(view.dims.sizes(new_shape, extents))
    full = to_image(whole.reshape(new_shape), view.dims, [part.stop for part in new])
    assert torch.equal(to_image(ours, view.dims, extents), full[last_slices(new)])
    return True


def test_any_view_is_right_or_none() -> None:
    for seed in range(200):
        check_any_view(random.Random(seed))


def check_any_view(rng: random.Random) -> None:
    shape, dims = FORMS[rng.choice(sorted(FORMS))]
    primes = [p for size in shape for p in factors(size)]
    new_shape: list[int] = []
    while primes:
        take = rng.randint(1, min(4, len(primes)))
        new_shape.append(prod(primes[:take]))
        primes = primes[take:]
        if rng.random() < 0.1:
            new_shape.append(1)
    check_view(shape, dims, tuple(new_shape))


def factors(size: int) -> list[int]:
    found = []
    for prime in (2, 3):
        while size % prime == 0:
            found.append(prime)
            size //= prime
    return found


@pytest.mark.parametrize(
    ("shape", "dims", "new_shape", "expected"),
    [
        ((2, 3, 4, 1), IMAGE, (2, 3, 4), SpatialDims.of(-1, -1)),
        ((2, 3, 1, 1), IMAGE, (2, 3, 1), SpatialDims.of(-1, -1)),
        ((2, 3, 1, 1), IMAGE, (2, 3, 1, 1), IMAGE),
        ((2, 3, 1, 1), IMAGE, (2, 1, 3, 1, 1), IMAGE),
        ((2, 1, 1, 24), SpatialDims.of(-3, -2), (2, 1, 24), SpatialDims.of(-2, -2)),
        ((2, 5, 1, 24), SpatialDims.of(-3, -2), (2, 5, 24), SpatialDims.of(-2, -2)),
    ],
)
def test_rows_and_columns_of_size_one_go_where_networks_expect_them(
    shape: tuple[int, ...],
    dims: SpatialDims,
    new_shape: tuple[int, ...],
    expected: SpatialDims,
) -> None:
    view = regroup(shape, new_shape, dims, [shape[dim] for dim in dims.at])
    assert view is not None
    assert view.dims == expected


# --- tokens that belong to no pixel

BESIDE = SpatialDims.of(-2, -2)._replace(prefix=2, suffix=1)
COUNT = 2 + H * W + 1


@pytest.mark.parametrize(
    ("new_shape", "dims", "steps", "factors"),
    [
        ((5, COUNT, 3, 4), BESIDE._replace(at=(-3, -3)), (1, 1), (1, 1)),
        ((5, COUNT * 12), BESIDE._replace(at=(-1, -1), prefix=24, suffix=12), (1, 1), (1, 12)),
        ((5 * COUNT, 12), None, (), ()),
        ((5, 3, COUNT // 3, 12), None, (), ()),
    ],
)
def test_tokens_beside_pixels_stay_together(new_shape, dims, steps, factors) -> None:
    """A dim of 99 tokens, of which three belong to no pixel, is never cut in three."""
    view = regroup((5, COUNT, 12), new_shape, BESIDE, (H, W))
    assert (view is None) == (dims is None)
    if view is not None:
        assert view == (dims, new_shape, steps, factors)
