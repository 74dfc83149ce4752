"""The command line of `spatialdl-features`."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spatialdl.comm.capacity import usable_cores
from spatialdl.common.text import positive_int
from spatialdl.inference.features.encoders.encoder import INTERPOLATIONS, POOLS, Wish
from spatialdl.inference.features.results import LAYOUTS
from spatialdl.slides.batch.tile_options import WHOLE_TILE, add_cutting_options

PRECISIONS = {
    "float32": "float32",
    "float64": "float64",
    "bf16": "bf16-mixed",
    "fp16": "fp16-mixed",
}
"""Values of `--precision`, and the corresponding values of `trainer.precision`."""

DTYPES = ("float16", "float32")
DEVICES = ("auto", "cpu", "cuda", "xpu")

CUTTING = (
    *("tile_size", "mpp", "mag", "level", "min_tissue", "slide_mpp", "background", "overlap"),
    *("edge", "filter", "stain_normalise", "mask_dir", "annotations", "stain_reference"),
)
"""Options that configure how slides are cut; not for data sets."""

_OF_TILES = (
    *("tile_size", "overlap", "edge", "filter", "min_tissue", "annotations", "crop", "split"),
    *("batch_size", "readers", "jobs", "layout"),
)
_FILES = ("mask_dir", "annotations", "stain_reference")  # contents are part of slide keys
_MOST_READERS = 4
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and add `wish`, the request for an encoder; exits on invalid options.

    Raises:
        ValueError: an argument of the encoder is repeated, or options conflict.
    """
    options = parser().parse_args(argv)
    if options.whole:
        _check_whole(options)
    elif options.grid is not None or options.limit_gb is not None:
        raise ValueError("--grid and --limit-gb need --whole: add it, or leave them out")
    if options.layout == "clam" and options.dtype == "float16":
        raise ValueError(
            "--layout clam --dtype float16: CLAM needs features of float32, as it does not convert "
            "them; leave out --dtype"
        )
    options.dtype = options.dtype or ("float32" if options.layout == "clam" else "float16")
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
    """Check that no options of tiles are given with `--whole`.

    Raises:
        ValueError: some are.
    """
    if clash := given_options(options, _OF_TILES):
        raise ValueError(f"{', '.join(clash)} is for tiles, but --whole has none: leave it out")
    if options.limit_gb is not None and options.grid is None:
        raise ValueError(
            f"--limit-gb {options.limit_gb:g} needs regions split by a single process: add "
            "--grid ROWS,COLS"
        )


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    made = argparse.ArgumentParser(
        prog="spatialdl-features",
        description="Compute features of the tiles of slides, or of a data set of tiles, with a "
        "frozen encoder.",
        epilog="Writes DIR/h5/NAME.h5 per slide with `features` and `coords`, in the format of "
        "TRIDENT; --layout clam writes a data folder for CLAM, --whole maps. Under mpiexec or srun "
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
    add("--out", required=True, type=Path, metavar="DIR", help="output folder")
    _add_encoder(made.add_argument_group("encoder"))
    cutting = made.add_argument_group("tiles of slides, cut as by spatialdl-tile")
    cutting.add_argument(
        "--tile-size",
        type=positive_int,
        metavar="N",
        help="rows and columns of a tile (default: the encoder's input size)",
    )
    add_cutting_options(made, required=False)
    _add_whole(made.add_argument_group("whole regions"))
    add("--split", metavar="NAME", help="split of the data set (default: all samples)")
    add("--recursive", action="store_true", help="search folders recursively")
    _add_work(made.add_argument_group("work"))
    return made


def _add_encoder(group: Any) -> None:
    add = group.add_argument
    add(
        "--encoder",
        required=True,
        metavar="NAME",
        help="timm:NAME, torchvision:NAME, transformers:FOLDER, or your own package.Class",
    )
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help="weights of the encoder: .safetensors, or a state dict written by torch.save",
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
        help="output of a transformers encoder: pooler_output, class token or mean of patches "
        "(default auto: the first of these that the encoder has)",
    )
    add("--download", action="store_true", help="download missing weights")
    add(
        "--crop",
        action="store_true",
        help="resize and crop as in the encoder's transform (default: resize the whole tile to the "
        "input size)",
    )
    add("--input-size", type=positive_int, metavar="N", help="rows and columns of its input")
    add("--mean", type=_three, metavar="R,G,B", help="mean of its input (default: its own)")
    add("--std", type=_three, metavar="R,G,B", help="std of its input (default: its own)")
    add("--interpolation", choices=INTERPOLATIONS, help="interpolation for resizing tiles")


def _add_whole(group: Any) -> None:
    add = group.add_argument
    add(
        "--whole",
        action="store_true",
        help="compute a map of the bounding box of each slide's tissue, DIR/maps/NAME.h5 and .png, "
        "instead of a vector per tile; ranks share each region",
    )
    add(
        "--grid",
        type=_grid,
        metavar="ROWS,COLS",
        help="parts of a region: one per rank (default: as square as possible), or processed one "
        "after the other by a single process",
    )
    add(
        "--limit-gb",
        type=_above_zero,
        metavar="X",
        help="with --grid in a single process: 10^9 bytes of activations in memory, the rest is "
        "offloaded to disk (default: no limit)",
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
        help="dtype of the features (default float16; with --layout clam always float32)",
    )
    add(
        "--precision",
        choices=tuple(PRECISIONS),
        default="float32",
        help="precision of the encoder; bf16 and fp16 are mixed (default float32)",
    )
    add(
        "--device",
        choices=DEVICES,
        default="auto",
        help="default auto: an accelerator if any",
    )
    add("--batch-size", type=positive_int, default=64, metavar="N", help="tiles per batch")
    add(
        "--readers",
        type=positive_int,
        default=max(1, min(_MOST_READERS, usable_cores())),
        metavar="N",
        help="threads per process that read tiles ahead (default: up to 4)",
    )
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="launch N ranks, each with an encoder, over the devices of a machine in turn",
    )
    add("--overwrite", action="store_true", help="replace features computed with other settings")
    add("--skip-errors", action="store_true", help="exit with 0 even if slides failed")


def cutting_settings(options: argparse.Namespace) -> dict[str, object]:
    """Cutting settings of the run; contents of files are covered by the keys of slides."""
    settings = {
        name: getattr(options, name) is not None if name in _FILES else getattr(options, name)
        for name in CUTTING
    }
    return {**settings, "tile_size": None, "whole": True} if options.whole else settings


def given_options(options: argparse.Namespace, names: Sequence[str] = CUTTING) -> list[str]:
    """Those options of some names, by default of cutting, that differ from their defaults."""
    defaults = parser()
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(options, name) != defaults.get_default(name)
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
