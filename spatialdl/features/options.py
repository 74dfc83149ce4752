"""The command line of `spatialdl-features`."""

from __future__ import annotations

import argparse
import ast
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spatialdl.features.encoders.encoder import POOLS, Wish
from spatialdl.features.encoders.preprocessing import INTERPOLATIONS
from spatialdl.features.results import LAYOUTS
from spatialdl.slides.batch.choosing import add_options
from spatialdl.slides.batch.options import WHOLE_TILE, add_resolution, add_tissue
from spatialdl.text import positive_int

PRECISIONS = {
    "float32": "float32",
    "float64": "float64",
    "bf16": "bf16-mixed",
    "fp16": "fp16-mixed",
}
"""Names of `--precision`, and of the same in training."""

DTYPES = ("float16", "float32")
DEVICES = ("auto", "cpu", "cuda", "xpu")

CUTTING = (
    *("tile_size", "mpp", "mag", "level", "min_tissue", "slide_mpp", "background", "overlap"),
    *("edge", "filter", "stain_normalise", "mask_dir", "annotations", "stain_reference"),
)
"""Options that say how slides are cut; a data set is cut already."""

_OF_TILES = (
    *("tile_size", "overlap", "edge", "filter", "min_tissue", "annotations", "crop", "split"),
    *("batch_size", "readers", "jobs", "layout"),
)
_FILES = ("mask_dir", "annotations", "stain_reference")  # whose contents are in keys of slides
_MOST_READERS = 4
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `wish`, the encoder; ends the process where one of them is wrong.

    Raises:
        ValueError: an argument of the encoder is given twice, or the layout has another dtype.
    """
    options = parser().parse_args(argv)
    if options.whole:
        _check_whole(options)
    elif options.grid is not None or options.limit_gb is not None:
        raise ValueError("--grid and --limit-gb cut whole regions: add --whole, or leave them out")
    options.dtype = _dtype(options.layout, options.dtype)
    arguments: dict[str, Any] = {}
    for key, value in options.encoder_args:
        if key in arguments:
            raise ValueError(f"--encoder-args gives {key} twice: {arguments[key]} and {value}")
        arguments[key] = value
    options.wish = Wish(
        options.encoder,
        options.weights,
        arguments,
        options.pool,
        options.download,
        options.crop,
        options.input_size,
        options.mean,
        options.std,
        options.interpolation,
        options.tile_size,
        options.whole,
    )
    if options.whole:
        options.tile_size = WHOLE_TILE
    return options


def _check_whole(options: argparse.Namespace) -> None:
    """Refuse options that whole regions have no use for.

    Raises:
        ValueError: naming them.
    """
    usual = parser()
    clash = [
        f"--{name.replace('_', '-')}"
        for name in _OF_TILES
        if getattr(options, name) != usual.get_default(name)
    ]
    if clash:
        raise ValueError(f"{', '.join(clash)} is of tiles, and --whole has none: leave it out")
    if options.limit_gb is not None and options.grid is None:
        raise ValueError(
            f"--limit-gb {options.limit_gb:g} is of regions that one process cuts into parts: add "
            "--grid ROWS,COLS"
        )


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    made = argparse.ArgumentParser(
        prog="spatialdl-features",
        description="Compute features of the tiles of slides, or of a data set of tiles, with a "
        "frozen encoder.",
        epilog="Each slide gives DIR/h5/NAME.h5 with `features` and `coords`, as TRIDENT reads "
        "them; --layout clam makes a data folder of CLAM, and --whole a map. Under mpiexec or srun "
        "the ranks share the slides, or with --whole each region.",
    )
    add = made.add_argument
    add(
        "slides",
        nargs="+",
        type=Path,
        metavar="SLIDES|SET",
        help="slides, folders of slides, or patterns; or the folder of one data set of tiles",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder of features to make")
    _add_encoder(made.add_argument_group("encoder"))
    cutting = made.add_argument_group("tiles of slides, as spatialdl-tile cuts them")
    cutting.add_argument(
        "--tile-size",
        type=positive_int,
        metavar="N",
        help="rows and columns of a tile (default: what the encoder takes)",
    )
    add_resolution(made, required=False)
    add_tissue(made)
    add_options(made)
    _add_whole(made.add_argument_group("whole regions"))
    add("--split", metavar="NAME", help="of a data set: the split that is taken (default all)")
    add("--recursive", action="store_true", help="look for slides in folders of folders, too")
    _add_work(made.add_argument_group("work"))
    return made


def _add_encoder(group: Any) -> None:
    add = group.add_argument
    add(
        "--encoder",
        required=True,
        metavar="NAME",
        help="timm:NAME, torchvision:NAME, transformers:FOLDER, or package.Class of your own",
    )
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help="weights of the encoder: .safetensors, or what torch.save wrote of a state dict",
    )
    add(
        "--encoder-args",
        nargs="+",
        type=_argument,
        default=[],
        metavar="KEY=VALUE",
        help="arguments of the network, such as init_values=1e-5 dynamic_img_size=true",
    )
    add(
        "--pool",
        choices=POOLS,
        default="auto",
        help="of transformers: pooler_output, the class token, or the mean of the patches "
        "(default auto: the first of these that the encoder has)",
    )
    add("--download", action="store_true", help="fetch weights that are not on this machine")
    add(
        "--crop",
        action="store_true",
        help="resize and crop as the encoder's own transform does (default: the whole tile is "
        "resized to what the encoder takes)",
    )
    add("--input-size", type=positive_int, metavar="N", help="rows and columns that it takes")
    add("--mean", type=_three, metavar="R,G,B", help="of its input, in place of what it says")
    add("--std", type=_three, metavar="R,G,B", help="of its input, in place of what it says")
    add("--interpolation", choices=INTERPOLATIONS, help="by which tiles are resized")


def _add_whole(group: Any) -> None:
    add = group.add_argument
    add(
        "--whole",
        action="store_true",
        help="in place of a vector a tile a map of the box around the tissue of each slide, "
        "DIR/maps/NAME.h5 and .png; ranks share each region",
    )
    add(
        "--grid",
        type=_grid,
        metavar="ROWS,COLS",
        help="into how many parts a region is cut: one a rank (default: as square as it goes), or "
        "in one process one after the other",
    )
    add(
        "--limit-gb",
        type=_above_zero,
        metavar="X",
        help="of one process with --grid: 10^9 bytes of activations in memory, others lie on a "
        "disk (default: no limit)",
    )


def _add_work(group: Any) -> None:
    add = group.add_argument
    add(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="h5: h5/NAME.h5; clam: h5_files/NAME.h5 and pt_files/NAME.pt (default h5)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of the features (default float16; float32 with --layout clam, which takes no other)",
    )
    add(
        "--precision",
        choices=tuple(PRECISIONS),
        default="float32",
        help="in which the encoder computes; bf16 and fp16 are mixed (default float32)",
    )
    add("--device", choices=DEVICES, default="auto", help="default auto: an accelerator if any")
    add("--batch-size", type=positive_int, default=64, metavar="N", help="tiles at a time")
    add(
        "--readers",
        type=positive_int,
        default=max(1, min(_MOST_READERS, len(os.sched_getaffinity(0)))),
        metavar="N",
        help="threads of each process that read tiles ahead (default up to 4)",
    )
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes on this machine, each with an encoder; they take its devices in turn",
    )
    add("--overwrite", action="store_true", help="replace features of other settings")
    add("--skip-errors", action="store_true", help="exit with 0 although slides were skipped")


def _dtype(layout: str, given: str | None) -> str:
    usual = "float32" if layout == "clam" else "float16"
    if layout == "clam" and given not in (None, usual):
        raise ValueError(
            f"--layout clam --dtype {given}: networks of CLAM compute in float32 and do not "
            "convert features; leave out --dtype"
        )
    return given or usual


def cutting_settings(options: argparse.Namespace) -> dict[str, object]:
    """How slides are cut; files count by being given, what is in them by the keys of slides."""
    said = {
        name: getattr(options, name) is not None if name in _FILES else getattr(options, name)
        for name in CUTTING
    }
    return {**said, "tile_size": None, "whole": True} if options.whole else said


def given_cutting(options: argparse.Namespace) -> list[str]:
    """Options on the cutting of slides that are not as they are by default."""
    usual = parser()
    return [
        f"--{name.replace('_', '-')}"
        for name in CUTTING
        if getattr(options, name) != usual.get_default(name)
    ]


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if value.lower() in _WORDS:
        return key, _WORDS[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _grid(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(one.isascii() and one.isdigit() and int(one) for one in parts):
        raise ArgumentTypeError(f"{text!r} is not ROWS,COLS, such as 2,2")
    return int(parts[0]), int(parts[1])


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _three(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(one) for one in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise ArgumentTypeError(f"{text!r} is not three numbers, such as 0.485,0.456,0.406")
    return values
