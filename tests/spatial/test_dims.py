"""Where rows and columns go when dims are regrouped: every tile by itself must know it."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from spatialdl.spatial.dims import IMAGE, SpatialDims, from_image, regroup, samples_of, to_image

H, W = 12, 8

FORMS = {
    "image": ((2, 3, H, W), IMAGE),
    "map": ((H, W), IMAGE),
    "channels last": ((2, H, W, 3), SpatialDims(-3, -2)),
    "rows last": ((2, W, 3, H), SpatialDims(-1, -3)),
    "tokens": ((2, H * W, 3), SpatialDims(-2, -2)),
    "tokens of all samples": ((2 * H * W, 3), SpatialDims(-2, -2, 2)),
    "rows of all samples": ((2 * H, W, 3), SpatialDims(-3, -2, 2)),
    "columns of all samples": ((3, H, 2 * W), SpatialDims(-2, -1, 1, 2)),
}


def part(whole: torch.Tensor, dims: SpatialDims, rows: slice, cols: slice) -> torch.Tensor:
    """The tile of a whole tensor, by way of its image."""
    return to_image(whole, dims, H, W)[..., rows, cols]


@pytest.mark.parametrize("name", FORMS)
def test_an_image_and_back(name: str) -> None:
    shape, dims = FORMS[name]
    whole = torch.arange(prod(shape)).reshape(shape)
    image = to_image(whole, dims, H, W)
    assert image.shape[-2:] == (H, W)
    assert image.dim() >= 3
    assert samples_of(shape, dims) == image.shape[0]
    assert torch.equal(from_image(image, dims, shape), whole)
    tile = from_image(image[..., 3:7, 2:5], dims, shape)
    assert tile.shape == dims.sizes(shape, 4, 3)
    assert torch.equal(to_image(tile, dims, 4, 3), image[..., 3:7, 2:5])


def check_view(shape: tuple[int, ...], dims: SpatialDims, new_shape: tuple[int, ...]) -> bool:
    """A tile regrouped by itself must be the tile of the whole regrouped."""
    view = regroup(shape, new_shape, dims, H, W)
    if view is None:
        return False
    whole = torch.arange(prod(shape)).reshape(shape)
    rows = slice(H // view.row_step // 3 * view.row_step, H)
    cols = slice(0, W // view.col_step // 2 * view.col_step)
    height, width = rows.stop - rows.start, cols.stop
    tile = from_image(part(whole, dims, rows, cols), dims, shape)

    def scaled(bound: int, step: int, factor: int) -> int:
        return bound // step * factor

    new_height = scaled(height, view.row_step, view.row_factor)
    new_width = scaled(width, view.col_step, view.col_factor)
    ours = tile.reshape(view.dims.sizes(new_shape, new_height, new_width))
    full = to_image(
        whole.reshape(new_shape),
        view.dims,
        scaled(H, view.row_step, view.row_factor),
        scaled(W, view.col_step, view.col_factor),
    )
    first = scaled(rows.start, view.row_step, view.row_factor)
    expected = full[..., first:, :new_width]
    assert torch.equal(to_image(ours, view.dims, new_height, new_width), expected)
    return True


@pytest.mark.parametrize(
    ("form", "new_shape"),
    [
        ("image", (2, 3, H * W)),
        ("image", (6, H, W)),
        ("image", (2, 3 * H * W)),
        ("image", (6 * H * W,)),
        ("image", (2, 3, 1, H, 1, W)),
        ("image", (2, 3, 3, 4, 2, 4)),
        ("image", (2, 3 * H, W)),
        ("channels last", (2, H * W, 3)),
        ("channels last", (2, 3, 4, 2, 4, 3)),
        ("channels last", (2 * H * W, 3)),
        ("channels last", (2, H * W * 3)),
        ("tokens", (2, H, W, 3)),
        ("tokens", (2, 3, 4, 2, 4, 3)),
        ("tokens", (2, H * W, 1, 3)),
        ("tokens", (2 * H * W, 3)),
        ("tokens of all samples", (2, H, W, 3)),
        ("tokens of all samples", (2, H * W, 3)),
        ("rows of all samples", (2, H, W, 3)),
        ("columns of all samples", (3, H, 2, W)),
    ],
)
def test_views_that_networks_make(form: str, new_shape: tuple[int, ...]) -> None:
    shape, dims = FORMS[form]
    assert check_view(shape, dims, new_shape)


@pytest.mark.parametrize(
    ("form", "new_shape"),
    [
        ("channels last", (2, H, W * 3, 2)),  # other pixels than there are
        ("image", (2, 3, W, H)),
        ("image", (2, 3, 5, 5)),
        ("rows last", (2, 3, H * W)),  # columns before rows
        ("rows last", (2, W * 3 * H)),
        ("tokens", (2, W, H, 3)),
    ],
)
def test_views_that_mix_pixels_are_none(form: str, new_shape: tuple[int, ...]) -> None:
    shape, dims = FORMS[form]
    assert not check_view(shape, dims, new_shape)


@pytest.mark.parametrize("seed", range(300))
def test_any_view_is_right_or_none(seed: int) -> None:
    rng = random.Random(seed)
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
        ((2, 3, 4, 1), IMAGE, (2, 3, 4), SpatialDims(-1, -1)),
        ((2, 3, 1, 4), IMAGE, (2, 3, 4), SpatialDims(-1, -1)),
        ((2, 3, 1, 1), IMAGE, (2, 3, 1), SpatialDims(-1, -1)),
        ((2, 3, 1, 1), IMAGE, (2, 3, 1, 1), IMAGE),
        ((2, 3, 1, 1), IMAGE, (2, 1, 3, 1, 1), IMAGE),
        ((2, 1, 1, 24), SpatialDims(-3, -2), (2, 1, 24), SpatialDims(-2, -2)),
        ((2, 1, 5, 24), SpatialDims(-3, -2), (2, 5, 24), SpatialDims(-2, -2)),
        ((2, 5, 1, 24), SpatialDims(-3, -2), (2, 5, 24), SpatialDims(-2, -2)),
    ],
)
def test_rows_and_columns_of_size_one_go_where_networks_expect_them(
    shape: tuple[int, ...],
    dims: SpatialDims,
    new_shape: tuple[int, ...],
    expected: SpatialDims,
) -> None:
    view = regroup(shape, new_shape, dims, shape[dims.rows], shape[dims.cols])
    assert view is not None
    assert view.dims == expected
