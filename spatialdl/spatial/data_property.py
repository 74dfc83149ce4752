"""``tensor.data = x``: the one way in which a tensor over many ranks gets into a plain one unseen.

PyTorch asks the tensor that is written to, never the value. A plain tensor would take the size of
a split one without its tile, and the next operation would read address 0: the process would end
by a segmentation fault. So `torch.Tensor.data` asks the value as well, in the whole process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _DataProperty:
    """`Tensor.data`; a value with a method `check_data_of` refuses what cannot take its values."""

    __name__ = "data"
    __objclass__ = Tensor

    def __init__(self, own: Any) -> None:
        self._get, self._set = own.__get__, own.__set__
        self.__doc__ = own.__doc__

    def __get__(self, tensor: Tensor | None, kind: Any = None) -> Any:
        return self if tensor is None else self._get(tensor)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        if type(value) is not Tensor and hasattr(type(value), "check_data_of"):
            value.check_data_of(tensor)
        self._set(tensor, value)


if not isinstance(Tensor.__dict__.get("data"), _DataProperty):
    torch.Tensor.data = _DataProperty(Tensor.data)  # type: ignore[assignment]
