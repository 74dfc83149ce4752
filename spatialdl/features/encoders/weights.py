"""Loading of encoder weights: all must be present; the file may also have a head."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from spatialdl.training.network.weights import read_weights, strip_prefixes

HEADS = ("head", "heads", "head_dist", "fc", "classifier", "last_linear", "logits")
"""Names of last layers, which encoders do not have."""

_COUNTER = "num_batches_tracked"  # missing in old files
_SHOWN = 3


def load_file(network: nn.Module, file: Path, base: str = "") -> None:
    """Load a file of weights.

    Args:
        network: the network without its head.
        file: .safetensors, or a file of `torch.save`, of which only tensors are unpickled.
        base: optional prefix of names, as in files of networks with a head.

    Raises:
        ValueError: weights are missing, have other shapes, or are of another network.
    """
    wanted = network.state_dict()
    given = strip_prefixes(read_weights(file), wanted)
    if base:
        given = {key.removeprefix(f"{base}."): value for key, value in given.items()}
    missing = [key for key in wanted if key not in given and not key.endswith(_COUNTER)]
    excess = [key for key in given if key not in wanted and key.partition(".")[0] not in HEADS]
    other = [key for key in wanted if key in given and given[key].shape != wanted[key].shape]
    if missing or excess or other:
        problems = [
            f"{what} {_some(keys)}"
            for what, keys in (
                ("missing", missing),
                ("unexpected", excess),
                ("of other shapes", other),
            )
            if keys
        ]
        raise ValueError(
            f"--weights {file} does not match the encoder: {'; '.join(problems)}; set sizes and "
            "options of the network by --encoder-args"
        )
    network.load_state_dict({key: given[key] for key in wanted if key in given}, strict=False)


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"
