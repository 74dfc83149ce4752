"""Pretrained weights from a file or from the local cache of a hub.

torchvision's and timm's names of ResNet-18 and -50 are those of `models.resnet`. Wrappers and
prefixes of other programs around a state dict are removed. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import load_json
from spatialdl.data.normalisation import NAMED, Normalisation
from spatialdl.training.checks import check_weights_file

log = logging.getLogger("spatialdl.trainer")

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network")
"""Keys under which checkpoints of other programs store the state dict."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.", "encoder.")
"""Prefixes that DataParallel, torch.compile, Lightning and others add to all names."""

_CLOSE = 1e-3
_COUNTER = "num_batches_tracked"  # missing in old files
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def load_weights(model: nn.Module, name: str) -> None:
    """Load pretrained weights into a network, except for a head of another size.

    Args:
        model: the network.
        name: a file (.safetensors, or written by `torch.save`), the name of a file in the cache of
            torch.hub, with or without the hash (``resnet18``), or a cached repository of the
            Hugging Face hub (``timm/resnet18.a1_in1k``).

    Raises:
        ValueError: if there is no such file, or its names or shapes do not match.
    """
    file = find_weights(name)
    wanted = model.state_dict()
    stored = strip_prefixes(read_weights(file), wanted)
    other = {key for key in stored if key in wanted and stored[key].shape != wanted[key].shape}
    head = head_of(model)
    left_out = head if head & other or not head & set(stored) else set()
    wrong = sorted(other - left_out)
    missing = [k for k in wanted if k not in {*stored, *left_out} and not k.endswith(_COUNTER)]
    unexpected = [key for key in stored if key not in wanted]
    if wrong or missing or unexpected:
        raise ValueError(_mismatch(file, stored, wanted, wrong, missing, unexpected))
    model.load_state_dict({k: v for k, v in stored.items() if k not in left_out}, strict=False)
    loaded = sum(stored[key].numel() for key in stored if key not in left_out)
    log.info("weights: loaded %.2f M numbers from %s", loaded / 1e6, file)
    for key in sorted(left_out):
        size = _size(stored[key]) if key in stored else "none"
        log.info("weights: %s is initialised, %s; the file has %s", key, _size(wanted[key]), size)


def find_weights(name: str) -> Path:
    """Find the file of a name, see `load_weights`.

    Raises:
        ValueError: if there is none, or several.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    check_weights_file(name)
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    files = [file for file in hub.glob("*") if name in (file.name, file.stem)]
    files = files or [file for file in hub.glob("*") if file.name.startswith(f"{name}-")]
    if len(files) > 1:
        raise ValueError(
            f"weights={name} is ambiguous: {hub} has "
            f"{' and '.join(sorted(file.name for file in files))}; set one of them"
        )
    if files:
        return files[0]
    cached = _in_hugging_face_cache(name) if name.count("/") == 1 else None
    if cached is None:
        raise ValueError(
            f"weights={name} is not a file, and neither in {hub} nor in the cache of the Hugging "
            "Face hub: download it first, on a machine with network access "
            "(torch.hub.load_state_dict_from_url, or hf download REPOSITORY)"
        )
    return cached


def _in_hugging_face_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    with suppress(ValueError):  # not a valid repository name
        for file in _HUB_FILES:
            cached = try_to_load_from_cache(name, file)
            if isinstance(cached, str):
                return Path(cached)
    return None


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read the state dict of a file, without its wrapper.

    Raises:
        ValueError: if it cannot be read, or contains anything but tensors.
    """
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"weights: cannot read {file}: {reason}; a file of weights must contain only tensors, "
            "as written by torch.save(model.state_dict(), FILE)"
        ) from error
    while isinstance(content, Mapping):
        inner = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = content[inner[0]]
    tensors = isinstance(content, Mapping) and all(isinstance(v, Tensor) for v in content.values())
    if not tensors or not content:
        shown = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else content
        raise ValueError(
            f"weights: {file} is not a state dict, but a {type(content).__name__}: {shown}"
        )
    return {str(key): value for key, value in content.items()}


def strip_prefixes(stored: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes that all names share, unless names of the network have them too."""
    while True:
        common = [prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in stored)]
        if not common or any(key.startswith(common[0]) for key in wanted):
            return stored
        stored = {key.removeprefix(common[0]): value for key, value in stored.items()}


def head_of(model: nn.Module) -> set[str]:
    """Parameter names of the last layer, which depends on the number of classes."""
    last: set[str] = set()
    for name, module in model.named_modules():
        own = {f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)}
        last = own or last
    return last


def _mismatch(
    file: Path,
    stored: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    wrong: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> str:
    texts = [f"weights: {file} does not match this network"]
    for key in wrong[:3]:
        texts.append(f"{key} is {_size(stored[key])} in the file, {_size(wanted[key])} here")
    for kind, keys, others in (
        ("missing key", missing, unexpected),
        ("unexpected key", unexpected, missing),
    ):
        for key in keys[:3]:
            near = get_close_matches(key, others or list(wanted), n=1, cutoff=0.5)
            texts.append(f"{kind} {key}" + (f" (nearest: {near[0]})" if near else ""))
        if len(keys) > 3:
            texts.append(f"and {len(keys) - 3} more")
    return "; ".join(texts)


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def check_alike(model: nn.Module, world: Communicator) -> None:
    """Check that all ranks have read the same weights; files may differ between machines.

    Raises:
        ValueError: on all ranks, if weights differ.
    """
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    digests = world.allgather(digest.hexdigest())
    others = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if others:
        raise ValueError(
            f"rank {others[0]} has read other weights than rank 0: use a file on a shared file "
            "system, or identical caches on all machines"
        )


# --- input of pretrained weights

Numbers = tuple[tuple[float, ...], tuple[float, ...]]


def expected_input(name: str, file: Path) -> Numbers | None:
    """Mean and std of the input of pretrained weights; None if unknown.

    Read from timm's `config.json` beside the file. ImageNet's for torchvision files in the cache
    of torch.hub, and for timm repositories without `config.json`.

    Args:
        name: name passed to `find_weights`.
        file: file of the weights.
    """
    content: Any = load_json(file.parent / "config.json")
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        numbers = content.get("pretrained_cfg", content)
        return tuple(map(float, numbers["mean"])), tuple(map(float, numbers["std"]))
    is_of_hub = file.parent == Path(torch.hub.get_dir()) / "checkpoints"
    if is_of_hub or name.startswith("timm/"):
        return NAMED["imagenet"]["mean"], NAMED["imagenet"]["std"]
    return None


def warn_of_other_input(name: str, file: Path, normalisation: Normalisation, channels: int) -> None:
    """Warn if the normalisation of a run differs from that of the weights."""
    expected = expected_input(name, file)
    if expected is None or {len(one) for one in expected} != {channels}:
        return
    here = normalisation.by_channel(channels)
    pairs = zip((*here[0], *here[1]), (*expected[0], *expected[1]), strict=True)
    if any(abs(one - other) >= _CLOSE for one, other in pairs):
        mean, std = (f"[{','.join(f'{one:g}' for one in values)}]" for values in expected)
        log.warning(
            "weights=%s were trained with other means or deviations of the input than this run "
            "has: set data.mean=%s data.std=%s",
            *(name, mean, std),
        )
