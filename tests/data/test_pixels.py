from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.pixels import DTYPES, as_image, as_mask, image_dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_keep_their_type_in_the_usual_order_of_bytes(dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype)
    for given in (array, array.astype(array.dtype.newbyteorder(">")), array.T.copy().T):
        image = as_image(given)
        assert image.dtype.str == np.dtype(dtype).newbyteorder("<").str
        assert (image == array[..., None]).all()
    assert np.shares_memory(as_image(array), array)


def test_values_of_floats_are_kept() -> None:
    array = np.array([[np.nan, np.inf, -0.0]], np.float32)
    assert as_image(array).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("bool", "type bool, expected one of uint8, .*use it as a mask if it is one"),
        ("int32", "type int32, expected .*convert it to int16 or uint16 if its values fit"),
        ("uint32", "convert it to uint16"),
        ("complex64", "channels of float32"),
        ("O", "convert it first"),
        ("longdouble", "convert it to float64"),
    ],
)
def test_other_types_are_refused_with_advice(dtype: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        image_dtype(np.dtype(dtype))
    with pytest.raises(ValueError, match=says):
        as_image(np.zeros((2, 2), dtype))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2), (0, 3), (3, 3, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected \\(rows, cols, channels\\)"):
        as_image(np.zeros(shape, np.uint8))


def test_masks_are_bytes() -> None:
    for dtype in (bool, np.uint8, np.int64, ">u2"):
        mask = as_mask(np.eye(3).astype(dtype), (3, 3))
        assert mask.dtype == np.uint8
        assert (mask == np.eye(3)).all()
    for array, says in [
        (np.eye(3), "type float64"),
        (np.full((3, 3), 256), "values 256 to 256"),
        (np.full((3, 3), -1), "values -1 to -1"),
        (np.zeros((3, 4), int), r"shape \(3, 4\), its image has 3 x 3"),
    ]:
        with pytest.raises(ValueError, match=says):
            as_mask(array, (3, 3))
