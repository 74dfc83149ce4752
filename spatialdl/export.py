"""``python -m spatialdl.export ckpt_path=RUN out=model.safetensors``

Exports the weights and buffers of a checkpoint as one safetensors file, with the names of the plain
network's state dict:

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

The metadata contains `mean`, `std` and `scale` of the input, (pixel / scale - mean) / std, and
`config`, `step` and `versions` of the run, each as JSON. `model.json` beside it describes the
use of the network: input, its size and channels, task, classes, and how to build the network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spatialdl.comm.abort import describe_error
from spatialdl.errors import CheckpointError

KEYS = {
    "ckpt_path": "a run directory (its latest checkpoint), RUN/checkpoints/best, or one checkpoint",
    "out": "the file to write (model.safetensors)",
    "average": "true (default) or false: export the averaged weights of trainer.ema, if any",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the export command."""
    try:
        values = _parse(arguments)
        out, average = values.get("out", "model.safetensors"), values.get("average", "true")
        path, file, step, averaged = export(
            values["ckpt_path"], Path(out), average=average == "true"
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {describe_error(error)}")
    what = "averaged weights" if averaged else "weights"
    print(f"{file}: the {what} of {path}, step {step}")


def export(ckpt_path: str, out: Path, *, average: bool = True) -> tuple[Path, Path, int, bool]:
    """Write all weights and buffers of a checkpoint to one file.

    Args:
        ckpt_path: a run directory, whose latest checkpoint is used, or a checkpoint.
        out: output file; replaced if it exists.
        average: whether to export averaged weights (``trainer.ema``), if the checkpoint has any.

    Returns:
        Checkpoint, file, step, and whether averaged weights were exported.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
    """
    from spatialdl.comm.single_process import SingleProcess
    from spatialdl.common.files import save_json, unfinished
    from spatialdl.training.checkpoints.content import AVERAGE, NUMBER, STATE
    from spatialdl.training.checkpoints.folder import LATEST, candidates
    from spatialdl.training.checkpoints.reading import Checkpoint, damages
    from spatialdl.training.checkpoints.writing import save

    if ckpt_path == LATEST:
        raise CheckpointError("ckpt_path=latest names no run: use the run directory")
    path, *_ = candidates(ckpt_path, Path())
    found = damages(path, SingleProcess())
    if found:
        raise CheckpointError(f"{path} is damaged: {'; '.join(found)}; name another checkpoint")
    with Checkpoint(path) as checkpoint:
        not_weights = STATE, NUMBER, AVERAGE
        names = [name for name in checkpoint.names("") if not name.startswith(not_weights)]
        averages = set(checkpoint.names(AVERAGE)) if average else set()
        tensors = {
            name: checkpoint.read(AVERAGE + name if AVERAGE + name in averages else name)
            for name in names
        }
        content = checkpoint.content
    recorded = {key: content[key] for key in ("step", "config", "versions")} | _input(content)
    metadata = {key: json.dumps(value) for key, value in recorded.items()}
    with unfinished(out) as temporary:
        save(temporary, tensors, {"format": "pt", **metadata})
    save_json(card_of(out), _card(content))
    return path, out, int(content["step"]), bool(averages)


def card_of(out: Path) -> Path:
    """Path of the JSON file beside exported weights that describes their use."""
    return out.with_suffix(".json")


def _card(content: Mapping[str, Any]) -> dict[str, Any]:
    config, known = content["config"], content.get("data") or {}
    data = config["data"]
    return {
        "task": config["task"]["name"],
        "classes": list(known.get("classes") or range(int(data["num_classes"]))),
        "image_size": list(data["image_size"]),
        "channels": data["channels"],
        "input": _input(content) | {"dtype": (known.get("input") or {}).get("dtype")},
        "model": config["model"],
        "step": content["step"],
        "versions": content["versions"],
    }


def _input(content: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and std of each channel, and scale, of the input normalisation."""
    from spatialdl.data.normalisation import Normalisation

    data = content["config"]["data"]
    values = (content.get("data") or {}).get("input")
    if values is None:  # older checkpoints do not record the pixels
        values = Normalisation.from_config(data).described(int(data["channels"]), None)
    return {key: values[key] for key in ("mean", "std", "scale")}


def _parse(arguments: Sequence[str] | None) -> dict[str, str]:
    keys = "\n".join(f"  {key}=...  {text}" for key, text in KEYS.items())
    parser = argparse.ArgumentParser(
        prog="python -m spatialdl.export",
        description=f"{__doc__}\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="key=value")
    words = parser.parse_args(arguments).words
    values = dict(word.partition("=")[::2] for word in words)
    if values.get("average", "true") not in ("true", "false"):
        raise ValueError(f"average={values['average']} must be true or false")
    unknown = [key for key in values if key not in KEYS]
    if values.get("out", "").endswith(".json"):
        raise ValueError(f"out={values['out']} conflicts with the JSON file beside the weights")
    if unknown or not values.get("ckpt_path"):
        what = f"unknown key {unknown[0]}" if unknown else "ckpt_path has no value"
        raise ValueError(f"{what}: python -m spatialdl.export ckpt_path=RUN out=model.safetensors")
    return values


if __name__ == "__main__":
    main()
