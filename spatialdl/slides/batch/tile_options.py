"""The command line of the tiler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from spatialdl.common.text import positive_int, size_in_bytes
from spatialdl.data.codec import CODECS
from spatialdl.data.options import add_shard_options
from spatialdl.slides.batch.choosing import NATIVE
from spatialdl.slides.cutting.filters import FILTERS, parse_filters
from spatialdl.slides.cutting.grid import EDGES
from spatialdl.slides.cutting.stains import METHODS
from spatialdl.slides.finding.annotations import BACKGROUND
from spatialdl.slides.finding.tissue import BACKGROUNDS
from spatialdl.slides.reading.resolution import MPP_AT_1X, PLAUSIBLE_MPP

FORMATS = ("shards", "coords")
UNLABELLED = ("error", "skip")
UNANNOTATED = ("drop", BACKGROUND)
SETTINGS = (
    *("tile_size", "mpp", "mag", "level", "min_tissue", "slide_mpp", "shard_size", "format"),
    *(
        "background",
        "overlap",
        "edge",
        "filter",
        "stain_normalise",
        "whole",
        "stripes",
        "codec",
        "quality",
    ),
)
"""Options that determine the tiles and are not files."""

WHOLE_TILE = 512
"""Side of the tiles from which the colours of a whole region are estimated."""

_FOLDERS = ("mask_dir", "annotations", "stain_reference")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spatialdl-tile",
        description="Cut slides into a data set of tiles.",
        epilog="`spatialdl-tile inspect SLIDE|DIR` shows what is in a slide or a data set, "
        "`spatialdl-tile verify DIR` compares all of it with its checksums.",
    )
    add = parser.add_argument
    add("slides", nargs="+", type=Path, metavar="SLIDES", help="slides, or folders of slides")
    add("--out", required=True, type=Path, metavar="DIR", help="data set folder to create")
    sample = parser.add_mutually_exclusive_group(required=True).add_argument
    sample("--tile-size", type=positive_int, metavar="N", help="rows and columns of a tile")
    sample(
        "--whole",
        action="store_true",
        help="cut the bounding box of the tissue of each slide as one image, instead of tiles",
    )
    _add_slides(parser)
    add_cutting_options(parser, required=True)
    _add_files(parser)
    _add_work(parser)
    return parser


def _add_slides(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--labels",
        type=Path,
        metavar="CSV",
        help="columns slide,label,split (train, val, test), and optionally mpp: micrometres per "
        "level-0 pixel, overrides --slide-mpp; label may be empty where --annotations have classes",
    )
    add(
        "--unlabelled",
        choices=UNLABELLED,
        default="error",
        help="slides without a line in --labels: error (default), or skip them",
    )
    add(
        "--allow-leaks",
        action="store_true",
        help="accept slides with the same image or of the same patient (column patient of "
        "--labels) in different splits",
    )
    add(
        "--unannotated",
        choices=UNANNOTATED,
        help="tiles outside of the regions of --annotations: drop (default), or background to keep "
        "those with at least --min-tissue of their area in no region, as class 0, background",
    )


def add_cutting_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options on resolution, tissue, annotations, filters and stains.

    Args:
        parser: of a command that cuts slides.
        required: whether a resolution must be given.
    """
    wanted = parser.add_mutually_exclusive_group(required=required).add_argument
    wanted("--mpp", type=_mpp, metavar="X", help="micrometres per pixel of the tiles")
    wanted(
        "--mag",
        type=_mag,
        metavar="X",
        help="objective power of the tiles, such as 20; the power of a slide is read from its "
        "metadata, else 10 / its mpp",
    )
    wanted("--level", type=_level, metavar="N", help="level of the slides, 0 the finest")
    add = parser.add_argument
    add(
        "--min-tissue",
        type=_fraction,
        default=0.5,
        metavar="F",
        help="fraction of a tile that must be tissue, 0 to 1 (default 0.5)",
    )
    add(
        "--slide-mpp",
        type=_mpp,
        metavar="X",
        help="micrometres per level-0 pixel of the slides, overrides their metadata",
    )
    add(
        "--background",
        choices=BACKGROUNDS,
        default="auto",
        help="bright: stained tissue on glass; dark: fluorescence; auto: detect (default)",
    )
    add(
        "--mask-dir",
        type=Path,
        metavar="DIR",
        help="tissue masks of other tools: NAME.png or .tif for each slide, of any size, non-zero "
        "where there is tissue",
    )
    add(
        "--annotations",
        type=Path,
        metavar="DIR",
        help="NAME.geojson (QuPath) or NAME.xml (ASAP, Aperio) for each slide: tiles are cut from "
        "these regions and have their classes; with --whole the masks have them; --labels then "
        "gives only the splits",
    )
    add("--overlap", type=int, default=0, metavar="N", help="pixels that neighbouring tiles share")
    add(
        "--edge",
        choices=EDGES,
        default="drop",
        help="right and bottom edge of a slide, where no whole tile fits: drop: no tile; pad: a "
        "tile padded with the slide's background; shift: a tile that ends at the edge and "
        "overlaps its neighbour (default drop)",
    )
    add(
        "--filter",
        type=_filters,
        default={},
        metavar="NAMES",
        help="drop tiles: any of "
        + ", ".join(f"{name}={most:g}" for name, (_, most) in FILTERS.items())
        + ", joined by commas; the number (optional) is the largest accepted fraction of black, "
        "white or inked pixels, or the largest blur, 0 to 1",
    )
    add(
        "--stain-normalise",
        choices=METHODS,
        help="normalise the stains of every slide to those of a reference",
    )
    add(
        "--stain-reference",
        type=Path,
        metavar="IMAGE",
        help="an image of stained tissue (default: built in, hematoxylin and eosin)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--format",
        choices=FORMATS,
        default="shards",
        help="shards: a data set of images; coords: coordinates of tiles, for CLAM and TRIDENT",
    )
    add_shard_options(
        parser,
        (*CODECS, NATIVE),
        "encoding of pixels in the shards: uncompressed, JPEG, lossless zstd or lz4, or "
        "(jpeg-native) the JPEG tiles of the slides, copied",
    )
    add(
        "--stripes",
        type=positive_int,
        metavar="N",
        help="number of shards that the rows of a whole region are split over (default: by "
        "--shard-size)",
    )
    add(
        "--stripe-count",
        type=int,
        metavar="N",
        help="on Lustre, number of storage targets per shard file; -1 for all",
    )
    add(
        "--stripe-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="on Lustre, bytes per stripe on each storage target, such as 4M",
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="worker processes on this machine (default 1); under mpiexec or srun all ranks but "
        "rank 0 are the workers",
    )
    add("--recursive", action="store_true", help="search folders for slides recursively")
    add("--dry-run", action="store_true", help="count tiles and bytes, write nothing")
    add("--overwrite", action="store_true", help="replace an existing data set")
    add("--skip-errors", action="store_true", help="exit with 0 even if slides were skipped")


def parsed_path(tool: str, argv: Sequence[str]) -> Path:
    """Parse the path argument of `spatialdl-tile inspect` or `verify`."""
    what = {
        "inspect": "Show what is in a slide, a data set or a folder of slides, and what is wrong.",
        "verify": "Compare every file of a data set with its checksum.",
    }
    parser = argparse.ArgumentParser(prog=f"spatialdl-tile {tool}", description=what[tool])
    parser.add_argument("path", type=Path, metavar="SLIDE|DIR" if tool == "inspect" else "DIR")
    path: Path = parser.parse_args(argv).path
    return path


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of `spatialdl-tile`; exits if one is invalid.

    Raises:
        ValueError: options exclude each other.
    """
    options = _parser().parse_args(argv)
    for clashing, why in _CLASHES:
        if all(_is_given(options, name) for name in clashing):
            raise ValueError(f"{' and '.join(clashing)} cannot be combined: {why}")
    if options.whole:
        options.tile_size = WHOLE_TILE
    elif options.stripes:
        raise ValueError("--stripes applies to whole regions; add --whole, or remove it")
    if options.unannotated and options.annotations is None:
        raise ValueError("--unannotated requires --annotations")
    return options


def settings_of(options: argparse.Namespace, classes: Sequence[str]) -> dict[str, object]:
    """Collect the settings that determine the tiles, besides slides and their files.

    Args:
        options: as parsed.
        classes: class names; labels are indices into them.
    """
    settings = {name: getattr(options, name) for name in SETTINGS}
    if options.whole:
        settings["tile_size"] = None
    if options.unannotated == BACKGROUND:  # no key for the default: older data sets lack it
        settings["unannotated"] = BACKGROUND
    files = {k: getattr(options, k) is not None for k in _FOLDERS}
    return {**settings, **files, "classes": [*classes]}


_CLASHES = (
    (("--stain-normalise", "--format coords"), "coordinates have no pixels"),
    (("--stain-normalise", f"--codec {NATIVE}"), "JPEG tiles are copied, not recoloured"),
    (("--whole", "--format coords"), "coordinates describe tiles"),
    (("--whole", "--overlap"), "each slide has one region"),
    (("--whole", "--filter"), "filters apply to tiles"),
    (("--whole", "--unannotated"), "pixels in no region are always background in masks"),
    (("--whole", "--edge pad"), "a region ends at the edge of its slide"),
    (("--whole", "--edge shift"), "a region ends at the edge of its slide"),
    (
        ("--edge pad", "--format coords"),
        "other tools read pixels beyond a slide as black; use --edge shift",
    ),
    (("--edge pad", f"--codec {NATIVE}"), "slides have no JPEG tiles beyond their edges"),
    (
        ("--edge shift", f"--codec {NATIVE}"),
        "shifted tiles are not aligned with the JPEG tiles of slides",
    ),
)


def _is_given(options: argparse.Namespace, text: str) -> bool:
    name, _, value = text.partition(" ")
    actual = getattr(options, name[2:].replace("-", "_"))
    return bool(actual == value if value else actual)


def number_in(low: float, high: float, what: str) -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`, for argparse; `what` they are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


_LOW, _HIGH = PLAUSIBLE_MPP
_mpp = number_in(_LOW, _HIGH, f"micrometres per pixel, between {_LOW} and {_HIGH}")
_POWERS = MPP_AT_1X / _HIGH, MPP_AT_1X / _LOW
_mag = number_in(*_POWERS, "the power of an objective, between {:g} and {:g}".format(*_POWERS))
_fraction = number_in(0.0, 1.0, "a fraction between 0 and 1")


def _level(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a level: 0, 1, 2 ...")
    return int(text)


def _filters(text: str) -> dict[str, float]:
    try:
        return parse_filters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
