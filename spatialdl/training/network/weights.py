"""Pretrained weights: from a file, or from what a hub has left in its cache on this machine.

torchvision's and timm's names of ResNet-18 and -50 are those of `models.resnet`; wrappers and
prefixes that other programs put around a state dict are taken off. Nothing is downloaded.
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
from spatialdl.training.checks import check_weights_file

log = logging.getLogger("spatialdl.trainer")

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network")
"""Keys under which programs keep a state dict beside other things."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.", "encoder.")
"""What DataParallel, torch.compile, Lightning and others put before every name."""

_COUNTER = "num_batches_tracked"  # old files have none
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def load_weights(model: nn.Module, name: str) -> None:
    """Load weights into a network, all of them but for a head of another size.

    Args:
        name: a file (.safetensors, or what `torch.save` wrote), the name of one in the cache of
            torch.hub, with or without what follows the dash (``resnet18``), or a repository of
            the Hugging Face hub in its cache (``timm/resnet18.a1_in1k``).

    Raises:
        ValueError: if there is no such file, or its names or shapes do not fit.
    """
    file = find_weights(name)
    wanted = model.state_dict()
    given = strip_prefixes(read_weights(file), wanted)
    other = {key for key in given if key in wanted and given[key].shape != wanted[key].shape}
    head = head_of(model)
    left_out = head if head & other or not head & set(given) else set()
    wrong = sorted(other - left_out)
    missing = [k for k in wanted if k not in {*given, *left_out} and not k.endswith(_COUNTER)]
    unexpected = [key for key in given if key not in wanted]
    if wrong or missing or unexpected:
        raise ValueError(_misfit(file, given, wanted, wrong, missing, unexpected))
    model.load_state_dict({k: v for k, v in given.items() if k not in left_out}, strict=False)
    taken = sum(given[key].numel() for key in given if key not in left_out)
    log.info("weights: %.2f M numbers of %s", taken / 1e6, file)
    for key in sorted(left_out):
        had = "nothing" if key not in given else _size(given[key])
        log.info("weights: %s is new, %s; the file has %s", key, _size(wanted[key]), had)


def find_weights(name: str) -> Path:
    """The file of some weights; see `load_weights`.

    Raises:
        ValueError: if there is none.
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
            f"weights={name} may be {' or '.join(sorted(file.name for file in files))} in {hub}: "
            "say which"
        )
    if files:
        return files[0]
    found = _in_hugging_face_cache(name) if name.count("/") == 1 else None
    if found is None:
        raise ValueError(
            f"weights={name} is no file, and neither in {hub} nor in the cache of the Hugging Face "
            "hub: download it first, where there is a network (torch.hub.load_state_dict_from_url, "
            "or hf download REPOSITORY)"
        )
    return found


def _in_hugging_face_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    with suppress(ValueError):  # no name of a repository
        for file in _HUB_FILES:
            found = try_to_load_from_cache(name, file)
            if isinstance(found, str):
                return Path(found)
    return None


def read_weights(file: Path) -> dict[str, Tensor]:
    """The state dict in a file, out of its wrapper.

    Raises:
        ValueError: if it cannot be read, or holds anything but tensors.
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
            f"weights: {file} cannot be read: {reason}; a file of weights holds nothing but "
            "tensors: torch.save(model.state_dict(), FILE)"
        ) from error
    while isinstance(content, Mapping):
        inner = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = content[inner[0]]
    tensors = isinstance(content, Mapping) and all(isinstance(v, Tensor) for v in content.values())
    if not tensors or not content:
        held = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else content
        raise ValueError(
            f"weights: {file} holds no state dict, but {type(content).__name__} {held}"
        )
    return {str(key): value for key, value in content.items()}


def strip_prefixes(given: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what stands before all of them, unless the network has it too."""
    while True:
        found = [prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in given)]
        if not found or any(key.startswith(found[0]) for key in wanted):
            return given
        given = {key.removeprefix(found[0]): value for key, value in given.items()}


def head_of(model: nn.Module) -> set[str]:
    """The names of the last layer that has parameters, which depends on the number of classes."""
    last: set[str] = set()
    for name, module in model.named_modules():
        own = {f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)}
        last = own or last
    return last


def _misfit(
    file: Path,
    given: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    wrong: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> str:
    said = [f"weights: {file} does not fit this network"]
    for key in wrong[:3]:
        said.append(f"{key} is {_size(given[key])} there, {_size(wanted[key])} here")
    for what, keys, others in (
        ("has no", missing, unexpected),
        ("has in excess", unexpected, missing),
    ):
        for key in keys[:3]:
            near = get_close_matches(key, others or list(wanted), n=1, cutoff=0.5)
            said.append(f"it {what} {key}" + (f" (nearest: {near[0]})" if near else ""))
        if len(keys) > 3:
            said.append(f"and {len(keys) - 3} more")
    return "; ".join(said)


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def check_alike(model: nn.Module, world: Communicator) -> None:
    """Refuse weights that differ between ranks, whose machines may have other files.

    Raises:
        ValueError: on all ranks, if they do.
    """
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    everybody = world.allgather(digest.hexdigest())
    others = [rank for rank, one in enumerate(everybody) if one != everybody[0]]
    if others:
        raise ValueError(
            f"rank {others[0]} has read other weights than rank 0: name a file that all machines "
            "share, or bring their caches to one state"
        )
