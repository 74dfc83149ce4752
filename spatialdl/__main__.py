"""``python -m spatialdl COMMAND ...``: the commands, each in one line, or one of them.

``python -m spatialdl train ...`` is ``python -m spatialdl.train ...``, and ``python -m spatialdl
tile ...`` is ``spatialdl-tile ...``. Imports nothing of the package before the command is known.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from difflib import get_close_matches

MODULES = {
    "train": "train a network on images split over ranks",
    "predict": "predict slides, volumes or data sets with a checkpoint",
    "evaluate": "compare predictions with labels: metrics, pictures, a report",
    "plan": "list the layouts that fit a cluster, with their memory and speed",
    "check": "compare a network on split images with a single process",
    "export": "write the weights of a checkpoint to one file",
}
"""Commands that are modules, ``python -m spatialdl.NAME``, and what they do."""

SCRIPTS = {
    "tile": ("slides.tile_cli", "cut slides into a data set, inspect and verify one"),
    "import": ("data.importing.command", "convert images, patches or volumes to a data set"),
    "stage": ("data.staging.command", "copy a data set to another disk"),
    "split": ("slides.cohort.split_cli", "divide a table of slides into train, val and test"),
    "features": ("inference.features.features_cli", "features of tiles with a frozen encoder"),
    "analyze": (
        "inference.analysis.analyze_cli",
        "k-means, PCA, ridge, neighbours of features",
    ),
}
"""Commands that are installed as ``spatialdl-NAME``: module with `main`, and what they do."""


def usage() -> str:
    """The commands, one line each."""
    lines = ["usage: python -m spatialdl COMMAND [--help] ..."]
    lines += ["", "also started as python -m spatialdl.COMMAND:"]
    lines += [f"  {name:<10}{about}" for name, about in MODULES.items()]
    lines += ["", "also started as spatialdl-COMMAND:"]
    lines += [f"  {name:<10}{about}" for name, (_, about) in SCRIPTS.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the commands, or run the one that the first argument names."""
    name = (sys.argv[1:2] or ["--help"])[0]
    if name in ("-h", "--help"):
        print(usage())
        return
    name = name.removeprefix("spatialdl").lstrip("-.") or name
    if name in MODULES:
        sys.argv[:2] = [f"spatialdl.{name}"]
        runpy.run_module(f"spatialdl.{name}", run_name="__main__", alter_sys=True)
    elif name in SCRIPTS:
        sys.argv[:2] = [f"spatialdl-{name}"]
        sys.exit(importlib.import_module(f"spatialdl.{SCRIPTS[name][0]}").main())
    else:
        near = get_close_matches(name, [*MODULES, *SCRIPTS], 1, 0.5)
        nearest = f"nearest: {near[0]}; " if near else ""
        commands = "`python -m spatialdl` lists the commands"
        sys.exit(f"error: command {name} is unknown; {nearest}{commands}")


if __name__ == "__main__":
    main()
