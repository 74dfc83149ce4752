"""``python -m spatialdl.export ckpt_path=RUN out=model.safetensors``

The weights and buffers of a checkpoint as one safetensors file, under the names of the plain
network's state dict:

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from spatialdl.comm.abort import describe_error
from spatialdl.errors import CheckpointError

KEYS = {
    "ckpt_path": "a run directory (its latest checkpoint), RUN/checkpoints/best, or one checkpoint",
    "out": "the file to write (model.safetensors)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Export, as the command line says."""
    try:
        given = _parse(arguments)
        path, out, step = export(given["ckpt_path"], Path(given.get("out", "model.safetensors")))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {describe_error(error)}")
    print(f"{out}: the weights of {path}, step {step}")


def export(ckpt_path: str, out: Path) -> tuple[Path, Path, int]:
    """Write one file with all weights and buffers of a checkpoint.

    Args:
        ckpt_path: a run directory, whose latest checkpoint is taken, or a checkpoint.
        out: a file, which is replaced if it is there.

    Returns:
        The checkpoint, the file, and the step.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
    """
    from spatialdl.comm.alone import Alone
    from spatialdl.training.checkpoints.content import NUMBER, STATE
    from spatialdl.training.checkpoints.folder import LATEST, candidates
    from spatialdl.training.checkpoints.reading import Checkpoint, damages
    from spatialdl.training.checkpoints.writing import save

    if ckpt_path == LATEST:
        raise CheckpointError("ckpt_path=latest of which run? name its directory")
    path, *_ = candidates(ckpt_path, Path())
    found = damages(path, Alone())
    if found:
        raise CheckpointError(f"{path} is damaged: {'; '.join(found)}; name another checkpoint")
    with Checkpoint(path) as checkpoint:
        names = [name for name in checkpoint.names("") if not name.startswith((STATE, NUMBER))]
        tensors = {name: checkpoint.read(name) for name in names}
        content = checkpoint.content
    metadata = {key: json.dumps(content[key]) for key in ("step", "config", "versions")}
    unfinished = out.with_name(f".{uuid4().hex}.tmp")
    try:
        save(unfinished, tensors, {"format": "pt", **metadata})
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return path, out, int(content["step"])


def _parse(arguments: Sequence[str] | None) -> dict[str, str]:
    keys = "\n".join(f"  {key}=...  {text}" for key, text in KEYS.items())
    parser = argparse.ArgumentParser(
        prog="python -m spatialdl.export",
        description=f"{__doc__}\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("given", nargs="+", metavar="key=value")
    words = parser.parse_args(arguments).given
    given = dict(word.partition("=")[::2] for word in words)
    unknown = [key for key in given if key not in KEYS]
    if unknown or not given.get("ckpt_path"):
        what = f"there is no key {unknown[0]}" if unknown else "ckpt_path has no value"
        raise ValueError(f"{what}: python -m spatialdl.export ckpt_path=RUN out=model.safetensors")
    return given


if __name__ == "__main__":
    main()
