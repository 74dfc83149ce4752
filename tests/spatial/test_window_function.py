from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from spatialdl.spatial.conv_window import Convolution
from spatialdl.spatial.transposed import TransposedConvolution

NARROW = [(13, width, kernel, 0) for width, kernel in ((2, 2), (3, 3), (4, 3))] + [(13, 1, 3, 1)]


@pytest.mark.parametrize(
    ("case", "channels", "dtype"),
    list(product(NARROW, (3, 16), (torch.bfloat16, torch.float16))),
)
def test_strips_of_one_output_are_right_in_half_precision(
    case: tuple[int, int, int, int], channels: int, dtype: torch.dtype
) -> None:
    """On CPUs with AMX a convolution with a stride gave anything at all for one column."""
    height, width, kernel, padding = case
    torch.manual_seed(0)
    x = torch.randn(2, channels, height, width).to(dtype)
    weight = torch.randn(4, channels, kernel, kernel).to(dtype)
    conv = Convolution((2, 2), (1, 1), 1)
    found = conv.forward(x, weight, None, (padding, padding))
    exact = conv.forward(x.double(), weight.double(), None, (padding, padding))
    assert found.shape[-1] == 1
    _near(found, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_of_one_column_are_enlarged_right_in_half_precision(dtype: torch.dtype) -> None:
    """The gradient of what is enlarged is a convolution with a stride, to one column."""
    torch.manual_seed(0)
    tile = torch.randn(2, 8, 13, 1).to(dtype)
    weight = torch.randn(8, 16, 3, 3).to(dtype)
    up = TransposedConvolution((2, 2), (1, 1), 1, (0, 0), (0, 0, 0, 0), (2, 27, 3))
    grad = torch.randn(2, 16, 27, 3).to(dtype)
    found, of_weight = up.backward(grad, tile, weight, (True, True))
    exact = up.backward(grad.double(), tile.double(), weight.double(), (True, True))
    _near(found, exact[0])
    _near(of_weight, exact[1])


def _near(found: Tensor | None, exact: Tensor | None) -> None:
    assert found is not None
    assert exact is not None
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())
