"""What a rank brings along of which all ranks must have the same.

Each subject is a number of items with values; equal ranks have equal values. Files are read on
every rank, for every machine may have others under the same name.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

import spatialdl
from spatialdl.training.checkpoints.folder import CONTENT, candidates

_PACKAGES = (  # what calculates, talks, reads pixels, or says what is to be done
    *("torch", "numpy", "mpi4py", "h5py", "hydra-core", "omegaconf", "scipy", "scikit-image"),
    *("pillow", "imagecodecs", "simplejpeg", "tifffile", "openslide-python", "openslide-bin"),
)

_OWN_PLACES = {
    *("data.path", "data.targets", "data.stage.to", "trainer.checkpoint.local", "weights"),
    *("ckpt_path", "shards", "slides", "stain_reference"),
}
"""Keys that may stand for another place on every machine; what lies there is compared."""

_OF_RANK_0 = ("logger.",)
"""Keys of what rank 0 alone does."""


class RankState(NamedTuple):
    """Something that all ranks must have the same of.

    Attributes:
        items: by name what this rank has.
        advice: what to do where ranks differ.
        place: where this rank has it from.
    """

    items: Mapping[str, str]
    advice: str
    place: str = ""


def code(config: DictConfig) -> RankState:
    """The files of this package, and those that ``_target_`` names."""
    package = Path(spatialdl.__file__).parent
    items = {
        f"{package.name}/{path.relative_to(package)}": _sum_of(path)
        # in a clone conf is a link, into which rglob does not go
        for path in (*package.rglob("*.py"), *(package / "conf").glob("*.py"))
    }
    for key, value in _leaves(OmegaConf.to_container(config)):
        for target in _targets(key, value):
            items |= _named_by(target)
    return RankState(items, "install one version for all machines", str(package))


def _targets(key: str, value: Any) -> Iterator[str]:
    """What ``_target_`` names, also in lists, such as those of metrics and callbacks."""
    if key.rpartition(".")[2] == "_target_" and isinstance(value, str):
        yield value
    for one in value if isinstance(value, list) else ():
        for inner, found in _leaves(one):
            yield from _targets(inner, found)


def _named_by(target: str) -> dict[str, str]:
    """The file in which something lies, and the version of its package."""
    if target.partition(".")[0] in (spatialdl.__name__, "torch"):
        return {}
    try:
        found = resolve_name(target)
    except Exception as error:  # told in full where it is needed, if no rank can import it
        return {target: f"not to be imported ({error})"}
    module = sys.modules.get(getattr(found, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return {}
    top = module.__name__.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    return {f"{target} in {Path(file).name}": _sum_of(Path(file))} | (
        {} if version is None else {top: str(version)}
    )


def versions() -> RankState:
    """Of Python, the packages that numbers and messages depend on, and the MPI library."""
    items = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            items[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            items[package] = "missing"
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    if torch is not None:
        items["torch"] = str(torch.__version__)  # tells the builds of a version apart
    if mpi is not None:
        items["MPI"] = mpi.Get_library_version().partition("\0")[0].splitlines()[0]
    return RankState(items, "start all ranks in one environment", sys.prefix)


def configuration(composed: DictConfig) -> RankState:
    """All keys as they are written, and what they stand for where that is the same for all.

    Args:
        composed: with Hydra's own part, of which the run directory counts.
    """
    written = dict(_leaves(OmegaConf.to_container(composed)))
    items = {}
    for key, value in written.items():
        if key.startswith("hydra.") and key != "hydra.run.dir":
            continue
        items[key] = "null" if value is None else str(value)
        if "${" in str(value) and not key.startswith(("hydra.", *_OF_RANK_0)):
            items[key] = _meaning(composed, key, items[key])
    return RankState(items, "give all ranks the same overrides")


def _meaning(composed: DictConfig, key: str, written: str) -> str:
    """What an interpolation comes to; as it is written where this cannot be told yet."""
    if key in _OWN_PLACES:
        return written
    try:
        found = OmegaConf.select(composed, key)
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
    except Exception:  # such as ${hydra:...} before there is a run directory
        return written
    return f"{written} = {found}"


def training_files(config: DictConfig) -> RankState:
    """What every rank reads of a data set beside the shards, of which the manifest has sums."""
    from spatialdl.data.format import MANIFEST

    data = config.data
    files = {}
    if data.name == "shards":
        files["manifest.json of data.path"] = Path(data.path).expanduser() / MANIFEST
    for key in ("targets", "labels"):
        if data.get(key) is not None:
            files[f"data.{key}"] = Path(data[key]).expanduser()
    return _files(files, "bring the copies of the data set to one state")


def prediction_files(config: DictConfig) -> RankState:
    """The network's checkpoint, which has the sums of its files, and the manifest of shards."""
    from spatialdl.data.format import MANIFEST

    found = candidates(str(config.ckpt_path), Path())
    files = {f"{CONTENT} of ckpt_path": path / CONTENT for path in found[:1]}
    if config.shards is not None:
        files["manifest.json of shards"] = Path(config.shards).expanduser() / MANIFEST
    return _files(files, "bring the copies to one state")


def evaluation_files(config: DictConfig) -> RankState:
    """What every rank reads to predict, and the labels."""
    if config.predictions is not None:
        return _files({}, "")
    labels = {} if config.labels is None else {"labels": Path(config.labels).expanduser()}
    found = prediction_files(config)
    own = _files(labels, "bring the copies to one state")
    places = ", ".join(filter(None, (found.place, own.place)))
    return RankState({**found.items, **own.items}, found.advice, places)


def _files(files: Mapping[str, Path], advice: str) -> RankState:
    places = ", ".join(str(path.absolute()) for path in files.values())
    return RankState({name: _sum_of(path) for name, path in files.items()}, advice, places)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """By their full names all values of a configuration that are no group of others."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _sum_of(path: Path) -> str:
    """The first digits of a file's SHA-256, or why there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        return f"not readable ({error.strerror})"


def sum_of_items(items: Mapping[str, str]) -> str:
    """A few digits that differ where any item does."""
    pairs: Sequence[tuple[str, str]] = sorted(items.items())
    return hashlib.sha256(repr(pairs).encode()).hexdigest()[:16]
