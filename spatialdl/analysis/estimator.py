"""Base class of estimators: parameters as in scikit-learn, and checks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.analysis.ranks import Comm
from spatialdl.analysis.rows import Rows, as_rows

Array = npt.NDArray[Any]


class Estimator:
    """Estimator with scikit-learn's interface; constructor arguments are its parameters."""

    comm: Comm
    device: str | torch.device
    n_features_in_: int

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; `deep` is ignored, as in scikit-learn's interface."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name.

        Raises:
            ValueError: unknown parameter.
        """
        known = self._names()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}, only {', '.join(known)}"
                )
            setattr(self, name, value)
        return self

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params())

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.get_params().items() if name != "comm"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def _fitted_rows(self, values: Any) -> Rows:
        """Rows to apply the model to.

        Raises:
            ValueError: the model is not fitted, or the rows have another width.
        """
        if not hasattr(self, "n_features_in_"):
            raise ValueError(f"{type(self).__name__} is not fitted: call fit first")
        rows = as_rows(values)
        if rows.count and rows.width != self.n_features_in_:
            raise ValueError(
                f"rows have {rows.width} columns, the model was fitted on {self.n_features_in_}"
            )
        return rows

    def _blocks(self, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
        return rows.blocks(torch.device(self.device))

    def _put(self, values: Array) -> Tensor:
        """Copy a fitted array to the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.device(self.device))


def positive(name: str, value: object) -> int:
    """Check that a value is a whole number of at least 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)


def numpy(values: Tensor) -> Array:
    """Copy a tensor to an array on the CPU."""
    return values.cpu().numpy()
