"""Base class of estimators: parameters as in scikit-learn, checks, and files of fitted models."""

from __future__ import annotations

import inspect
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.common.files import replacing
from spatialdl.inference.analysis.rows import Comm, Rows, as_rows

Array = npt.NDArray[Any]

_OF_OWN_ROWS = ("labels_", "folds_")
_DAMAGED = (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError)


class Estimator:
    """Estimator with scikit-learn's interface; constructor arguments are its parameters."""

    comm: Comm
    device: str | torch.device
    n_features_in_: int

    def get_params(self) -> dict[str, Any]:
        """Parameters by name."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

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

    def _applied(self, values: Any, function: Callable[[Tensor], Tensor]) -> Array:
        """The results (rows, ...) of a function of blocks of rows; without communication."""
        rows, device = self._fitted_rows(values), torch.device(self.device)
        none = torch.empty(0, self.n_features_in_, dtype=torch.float64, device=device)
        blocks = [none, *(block for _, block in rows.blocks(device))]
        return np.concatenate([numpy(function(block)) for block in blocks])

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


def save_model(path: Path, model: Estimator) -> None:
    """Write a fitted model atomically, without attributes of single rows.

    Raises:
        OSError: the file cannot be written.
    """
    params = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in model.get_params().items()
        if name not in ("comm", "device")
    }
    fitted = {
        name: np.asarray(value)
        for name, value in vars(model).items()
        if name.endswith("_") and not name.startswith("_") and name not in _OF_OWN_ROWS
    }
    about = {"estimator": type(model).__name__, "parameters": params}
    with replacing(path) as file:
        np.savez(file, about=np.array(json.dumps(about)), **fitted)  # type: ignore[arg-type]


def load_model(path: Path, kinds: tuple[type[Estimator], ...], device: str, method: str) -> Any:
    """Load a model of `save_model`.

    Args:
        path: file name.
        kinds: classes that the method can apply.
        device: device of the computation.
        method: name of the method, for messages.

    Raises:
        ValueError: the file is missing, damaged, or not a model of these kinds.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a model: expected a file model.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            kind = next((one for one in kinds if one.__name__ == about["estimator"]), None)
            if kind is None:
                raise ValueError(f"it is a {about['estimator']}, which {method} cannot apply")
            given = about["parameters"]
            if given.get("whiten"):
                raise ValueError("it whitens, which is no longer supported: fit it again")
            names = inspect.signature(kind).parameters
            known = {name: value for name, value in given.items() if name in names}
            model = kind(**known, device=device)  # type: ignore[call-arg]
            for name in set(file.files) - {"about"}:
                value = file[name]
                setattr(model, name, value if value.ndim else value.item())
    except _DAMAGED as error:
        raise ValueError(f"{path} has no valid model: {error}") from error
    return model
