"""Input normalisation of pretrained weights, if known."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from spatialdl.data.normalisation import NAMED, Normalisation
from spatialdl.data.saving import load_json

log = logging.getLogger("spatialdl.trainer")

_CLOSE = 1e-3
_CONFIG = "config.json"  # in a repository of the Hugging Face hub

Numbers = tuple[tuple[float, ...], tuple[float, ...]]


def expected_input(name: str, file: Path) -> Numbers | None:
    """Mean and std of the input of pretrained weights; None if unknown.

    Read from timm's `config.json` beside the file. ImageNet's for torchvision files in the cache
    of torch.hub, and for timm repositories without `config.json`.

    Args:
        name: name passed to `find_weights`.
        file: file of the weights.
    """
    content: Any = load_json(file.parent / _CONFIG)
    if isinstance(content, dict):
        inner = content.get("pretrained_cfg")
        stored = _numbers(inner if isinstance(inner, dict) else content)
        if stored is not None:
            return stored
    is_of_hub = file.parent == Path(torch.hub.get_dir()) / "checkpoints"
    if is_of_hub or name.startswith("timm/"):
        return NAMED["imagenet"]["mean"], NAMED["imagenet"]["std"]
    return None


def warn_of_other_input(name: str, file: Path, normalisation: Normalisation, channels: int) -> None:
    """Warn if the normalisation of a run differs from that of the weights."""
    expected = expected_input(name, file)
    if expected is None or len(expected[0]) != channels:
        return
    here = normalisation.by_channel(channels)
    pairs = zip((*here[0], *here[1]), (*expected[0], *expected[1]), strict=True)
    if all(abs(one - other) < _CLOSE for one, other in pairs):
        return
    log.warning(
        "weights=%s were trained with mean %s and std %s, but this run normalises with mean %s "
        "and std %s: set %s",
        *(name, *map(_shown, expected), *map(_shown, here), _keys(expected)),
    )


def _numbers(settings: dict[str, Any]) -> Numbers | None:
    numbers = []
    for key in ("mean", "std"):
        values = settings.get(key)
        is_list = isinstance(values, list) and len(values) > 0
        if not is_list or not all(type(one) in (int, float) for one in values):  # type: ignore[union-attr]
            return None
        numbers.append(tuple(map(float, values)))  # type: ignore[arg-type]
    return (numbers[0], numbers[1]) if len(numbers[0]) == len(numbers[1]) else None


def _keys(expected: Numbers) -> str:
    for name, known in NAMED.items():
        pairs = zip((*known["mean"], *known["std"]), (*expected[0], *expected[1]), strict=False)
        if len(expected[0]) == 3 and all(abs(one - other) < _CLOSE for one, other in pairs):
            return f"data.mean={name} data.std={name}"
    return f"data.mean={_shown(expected[0])} data.std={_shown(expected[1])}"


def _shown(values: Any) -> str:
    return f"[{','.join(f'{one:g}' for one in values)}]"
