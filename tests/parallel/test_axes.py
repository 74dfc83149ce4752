"""Named axes of a mesh: their product, and what is refused."""

from __future__ import annotations

import pytest

from spatialdl.parallel.axes import Axes


@pytest.mark.parametrize(
    ("axes", "text", "size"),
    [
        (Axes(), "data 1 x rows 1 x columns 1 = 1 rank", 1),
        (Axes(2, spatial=(2, 3)), "data 2 x rows 2 x columns 3 = 12 ranks", 12),
        (Axes(1, spatial=(4,)), "data 1 x positions 4 = 4 ranks", 4),
        (Axes(3, spatial=(2, 1, 2)), "data 3 x slices 2 x rows 1 x columns 2 = 12 ranks", 12),
        (
            Axes(2, 3, (1, 1), batch=2),
            "data 2 x stage 3 x rows 1 x columns 1 x batch 2 = 12 ranks",
            12,
        ),
    ],
)
def test_the_product_is_spelt_out(axes: Axes, text: str, size: int) -> None:
    assert str(axes) == text
    assert axes.size == size


def test_the_docstring_lists_every_axis() -> None:
    assert Axes.__doc__ is not None
    for name in Axes.__dataclass_fields__:
        assert f"\n        {name}: " in Axes.__doc__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"data": 0}, "the data axis of a mesh needs at least 1 rank, got 0"),
        ({"spatial": (2, 0)}, "the columns axis of a mesh needs at least 1 rank, got 0"),
        ({"spatial": ("2", 1)}, "the rows axis of a mesh needs at least 1 rank, got '2'"),
        ({"spatial": ()}, r"a grid has one to three numbers, .* got \(\)"),
        ({"spatial": (1, 1, 1, 1)}, "a grid has one to three numbers"),
        ({"spatial": (2, 1), "batch": 2}, "divides either images or samples, got data 1 x rows 2"),
        ({"tensor": 0}, "the tensor axis of a mesh needs at least 1 rank, got 0"),
    ],
)
def test_what_fits_no_mesh_is_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Axes(**arguments)


def test_parameters_are_replicated_along_all_axes_that_do_not_divide_them() -> None:
    axes = Axes(2, stage=3, spatial=(2, 1))
    assert axes.replicated() == ("data", "rows", "columns", "batch")
    assert axes.replicated(sharded=True) == ("rows", "columns", "batch")


def test_ranks_of_the_tensor_axis_hold_no_copies() -> None:
    axes = Axes(2, spatial=(2, 1), tensor=3)
    assert axes.size == 12
    assert "tensor" not in axes.replicated()
    assert str(axes) == "data 2 x rows 2 x columns 1 x tensor 3 = 12 ranks"


@pytest.mark.parametrize("spatial", [(2,), (2, 1), (1, 3, 2)])
def test_signals_images_and_volumes_have_a_mesh(spatial: tuple[int, ...]) -> None:
    assert Axes(1, spatial=spatial).spatial == spatial
