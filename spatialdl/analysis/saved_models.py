"""Save and load fitted models as `.npz` files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.analysis.decomposition import PCA, TruncatedSVD
from spatialdl.analysis.estimator import Estimator
from spatialdl.analysis.kmeans import KMeans
from spatialdl.analysis.ridge import Ridge, RidgeCV
from spatialdl.analysis.ridge_classes import RidgeClassifierCV
from spatialdl.data.saving import replacing

_CLASSES: dict[str, type[Estimator]] = {
    one.__name__: one for one in (KMeans, PCA, TruncatedSVD, Ridge, RidgeCV, RidgeClassifierCV)
}
_OF_OWN_ROWS = ("labels_", "folds_")
_DAMAGED = (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError)


def save_model(path: Path, model: Estimator) -> None:
    """Write a fitted model atomically, without attributes of single rows.

    Raises:
        ValueError: the model is not fitted.
        OSError: the file cannot be written.
    """
    if not hasattr(model, "n_features_in_"):
        raise ValueError(f"{type(model).__name__} is not fitted: call fit first")
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


def load_model(path: Path, **params: Any) -> Any:
    """Load a model of `save_model`.

    Args:
        path: file name.
        params: overrides of saved parameters, such as `device`.

    Raises:
        ValueError: the file is missing, damaged, or not a model.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a model: expected a file model.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            model = _CLASSES[about["estimator"]](**about["parameters"])
            for name in set(file.files) - {"about"}:
                value = file[name]
                setattr(model, name, value if value.ndim else value.item())
    except _DAMAGED as error:
        raise ValueError(f"{path} has no valid model: {error}") from error
    return model.set_params(**params)
