"""State that must match across ranks.

Each subject is a mapping of items to values, equal on consistent ranks. Every rank reads files
independently, because machines may have different files of the same name.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

import spatialdl
from spatialdl.training.checkpoints.folder import CONTENT, candidates

_PACKAGES = (  # for computation, communication, pixel decoding and configuration
    *("torch", "numpy", "mpi4py", "h5py", "hydra-core", "omegaconf", "scipy", "scikit-image"),
    *("pillow", "imagecodecs", "simplejpeg", "tifffile", "openslide-python", "openslide-bin"),
)

_LOCAL_PATHS = {
    *("data.path", "data.targets", "data.stage.to", "weights"),
    *("ckpt_path", "shards", "slides", "stain_reference"),
}
"""Keys that may resolve to different paths on each machine; the content is compared."""

_OF_RANK_0 = ("logger.",)
"""Keys that only rank 0 uses."""


class RankState(NamedTuple):
    """State that must match across ranks.

    Attributes:
        items: values by name.
        advice: how to make ranks consistent.
    """

    items: Mapping[str, str]
    advice: str


def code(config: DictConfig) -> RankState:
    """Digests of the files of this package, and of those named by ``_target_``."""
    package = Path(spatialdl.__file__).parent
    items = {
        f"{package.name}/{path.relative_to(package)}": _sum_of(path)
        # in a clone conf is a symlink, which rglob does not follow
        for path in (*package.rglob("*.py"), *(package / "conf").glob("*.py"))
    }
    for key, value in _leaves(OmegaConf.to_container(config)):
        for target in _targets(key, value):
            items |= _named_by(target)
    return RankState(items, "install the same version on all machines")


def _targets(key: str, value: Any) -> Iterator[str]:
    """Values of ``_target_``, also in lists, such as those of metrics and callbacks."""
    if key.rpartition(".")[2] == "_target_" and isinstance(value, str):
        yield value
    for element in value if isinstance(value, list) else ():
        for inner_key, inner in _leaves(element):
            yield from _targets(inner_key, inner)


def _named_by(target: str) -> dict[str, str]:
    """Digest of the file that defines a target, and the version of its package."""
    if target.partition(".")[0] in (spatialdl.__name__, "torch"):
        return {}
    try:
        target_object = resolve_name(target)
    except Exception as error:  # if no rank can import it, its later use prints the full error
        return {target: f"not importable ({error})"}
    module = sys.modules.get(getattr(target_object, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return {}
    top = module.__name__.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    return {f"{target} in {Path(file).name}": _sum_of(Path(file))} | (
        {} if version is None else {top: str(version)}
    )


def versions() -> RankState:
    """Versions of Python, of packages that affect results or messages, and of the MPI library."""
    items = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            items[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            items[package] = "missing"
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    if torch is not None:
        items["torch"] = str(torch.__version__)  # includes the build
    if mpi is not None:
        items["MPI"] = mpi.Get_library_version().partition("\0")[0].splitlines()[0]
    return RankState(items, "start all ranks in the same environment")


def configuration(composed: DictConfig) -> RankState:
    """All keys as written, and resolved where the result must be equal on all ranks.

    Args:
        composed: includes the ``hydra`` group, of which the run directory is compared.
    """
    written = dict(_leaves(OmegaConf.to_container(composed)))
    items = {}
    for key, value in written.items():
        if key.startswith("hydra.") and key != "hydra.run.dir":
            continue
        items[key] = "null" if value is None else str(value)
        if "${" in str(value) and not key.startswith(("hydra.", *_OF_RANK_0)):
            items[key] = _resolved(composed, key, items[key])
    return RankState(items, "give all ranks the same overrides")


def _resolved(composed: DictConfig, key: str, written: str) -> str:
    """Value with its interpolation resolved; as written where it cannot be resolved yet."""
    if key in _LOCAL_PATHS:
        return written
    try:
        value = OmegaConf.select(composed, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except Exception:  # such as ${hydra:...} without a run directory
        return written
    return f"{written} = {value}"


def training_files(config: DictConfig) -> RankState:
    """Files of a data set beside the shards, whose digests are in the manifest."""
    from spatialdl.data.format import MANIFEST

    data = config.data
    files = {}
    if data.name == "shards":
        files["manifest.json of data.path"] = Path(data.path).expanduser() / MANIFEST
    for key in ("targets", "labels"):
        if data.get(key) is not None:
            files[f"data.{key}"] = Path(data[key]).expanduser()
    return _files(files, "synchronise the copies of the data set")


def prediction_files(config: DictConfig) -> RankState:
    """The network's checkpoint, which has digests of its files, and the manifest of shards."""
    from spatialdl.data.format import MANIFEST

    checkpoints = candidates(str(config.ckpt_path), Path())
    files = {f"{CONTENT} of ckpt_path": path / CONTENT for path in checkpoints[:1]}
    if config.shards is not None:
        files["manifest.json of shards"] = Path(config.shards).expanduser() / MANIFEST
    return _files(files, "synchronise the copies")


def evaluation_files(config: DictConfig) -> RankState:
    """Files for prediction, and the labels."""
    if config.predictions is not None:
        return _files({}, "")
    labels = {} if config.labels is None else {"labels": Path(config.labels).expanduser()}
    predicted = prediction_files(config)
    own = _files(labels, "synchronise the copies")
    return RankState({**predicted.items, **own.items}, predicted.advice)


def _files(files: Mapping[str, Path], advice: str) -> RankState:
    return RankState({name: _sum_of(path) for name, path in files.items()}, advice)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Leaf values of a configuration by their dotted keys."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _sum_of(path: Path) -> str:
    """First digits of a file's SHA-256, or why it cannot be read."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe blocks
            return "not readable (not a regular file)"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        return f"not readable ({error.strerror})"
