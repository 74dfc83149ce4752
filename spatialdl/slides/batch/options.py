"""The command line of the tiler."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from spatialdl.data.codec import CODECS
from spatialdl.data.options import add_shard_options
from spatialdl.slides.batch.choosing import add_options
from spatialdl.slides.batch.parts import NATIVE
from spatialdl.slides.finding.region_mask import BACKGROUND
from spatialdl.slides.reading.resolution import MPP_AT_1X, PLAUSIBLE_MPP
from spatialdl.text import positive_int

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
"""Options that decide on tiles and are not files."""

WHOLE_TILE = 512
"""Side of the tiles of which colours of a whole region are told."""

_FOLDERS = ("mask_dir", "annotations", "stain_reference")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="spatialdl-tile",
        description="Cut slides into a data set of tiles.",
        epilog="`spatialdl-tile inspect FILE|DIR` shows what is in a slide or a data set, "
        "`spatialdl-tile verify DIR` compares all of it with its checksums.",
    )
    add = made.add_argument
    add("slides", nargs="+", type=Path, metavar="SLIDES", help="slides, or folders of slides")
    add("--out", required=True, type=Path, metavar="DIR", help="data set folder to make")
    _add_samples(made)
    _add_slides(made)
    add_options(made)
    _add_files(made)
    _add_work(made)
    return made


def _add_samples(made: argparse.ArgumentParser) -> None:
    sample = made.add_mutually_exclusive_group(required=True).add_argument
    sample("--tile-size", type=positive_int, metavar="N", help="rows and columns of a tile")
    sample(
        "--whole",
        action="store_true",
        help="in place of tiles the box around the tissue of each slide, as one image",
    )
    add_resolution(made, required=True)


def add_resolution(made: argparse.ArgumentParser, *, required: bool) -> None:
    """The options of which one says how fine tiles are."""
    wanted = made.add_mutually_exclusive_group(required=required).add_argument
    wanted("--mpp", type=_mpp, metavar="X", help="micrometres per pixel of the tiles")
    wanted(
        "--mag",
        type=_mag,
        metavar="X",
        help="power of the objective that the tiles are as if taken with, such as 20; that of the "
        "slide is what it says, else 10 / its mpp",
    )
    wanted("--level", type=_level, metavar="N", help="level of the slides, 0 the finest")


def _add_slides(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "--labels",
        type=Path,
        metavar="CSV",
        help="columns slide,label,split (train, val, test), and mpp if wanted: micrometres per "
        "level-0 pixel, before --slide-mpp; label may be empty where --annotations have classes",
    )
    add(
        "--unlabelled",
        choices=UNLABELLED,
        default="error",
        help="slides without a line in --labels: error (default), or skip to leave them out",
    )
    add(
        "--allow-leaks",
        action="store_true",
        help="take slides that show the same, or are of the same patient (column patient of "
        "--labels), in two splits",
    )
    add(
        "--unannotated",
        choices=UNANNOTATED,
        help="tiles outside of the regions of --annotations: drop (default), or background to take "
        "those of which at least --min-tissue lies in no region, with that class, the first",
    )
    add_tissue(made)


def add_tissue(made: argparse.ArgumentParser) -> None:
    """The options on how much tissue a tile has, and on what slides say of their resolution."""
    add = made.add_argument
    add(
        "--min-tissue",
        type=_fraction,
        default=0.5,
        metavar="F",
        help="part of a tile that must be tissue, 0 to 1 (default 0.5)",
    )
    add(
        "--slide-mpp",
        type=_mpp,
        metavar="X",
        help="micrometres per level-0 pixel of the slides, in place of what they say",
    )


def _add_files(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "--format",
        choices=FORMATS,
        default="shards",
        help="shards: a data set of images; coords: where the tiles are, for CLAM and TRIDENT",
    )
    add_shard_options(
        made,
        (*CODECS, NATIVE),
        "how pixels lie in the shards: as they are, as JPEG, compressed by zstd or lz4 without "
        "loss, or (jpeg-native) in the JPEG tiles of the slides as they are",
    )
    add(
        "--stripes",
        type=positive_int,
        metavar="N",
        help="shards over which the rows of a whole region are spread (default: by --shard-size)",
    )


def _add_work(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes that work on this machine (default 1); under mpiexec or srun all ranks "
        "but the first do",
    )
    add("--recursive", action="store_true", help="look for slides in folders of folders, too")
    add("--dry-run", action="store_true", help="count tiles and bytes, write nothing")
    add("--overwrite", action="store_true", help="replace a data set that is there")
    add("--skip-errors", action="store_true", help="exit with 0 although slides were skipped")


def parsed_path(tool: str, argv: Sequence[str]) -> Path:
    """What `spatialdl-tile inspect` or `verify` is to look at."""
    what = {
        "inspect": "Show what is in a slide, a data set, a shard, or a folder of slides.",
        "verify": "Compare every file of a data set with the checksum of what was written.",
    }
    made = argparse.ArgumentParser(prog=f"spatialdl-tile {tool}", description=what[tool])
    made.add_argument("path", type=Path, metavar="FILE|DIR" if tool == "inspect" else "DIR")
    path: Path = made.parse_args(argv).path
    return path


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of `spatialdl-tile`, which ends the process where one of them is wrong.

    Raises:
        ValueError: options do not go together.
    """
    options = _parser().parse_args(argv)
    for clashing, why in _CLASHES:
        if all(_is_given(options, name) for name in clashing):
            raise ValueError(f"{' and '.join(clashing)} do not go together: {why}")
    if options.whole:
        options.tile_size = WHOLE_TILE
    elif options.stripes:
        raise ValueError("--stripes is of whole regions; add --whole, or leave it out")
    if options.unannotated and options.annotations is None:
        raise ValueError("--unannotated is of tiles outside of --annotations, which are not given")
    return options


def settings_of(options: argparse.Namespace, classes: Sequence[str]) -> dict[str, object]:
    """What decides on tiles besides the slides and the files that belong to them.

    Args:
        options: as parsed.
        classes: that labels are indices into.
    """
    said = {name: getattr(options, name) for name in SETTINGS}
    if options.whole:
        said["tile_size"] = None
    if options.unannotated == BACKGROUND:  # data sets of before are added to as they are
        said["unannotated"] = BACKGROUND
    return {**said, **{k: getattr(options, k) is not None for k in _FOLDERS}, "classes": [*classes]}


_CLASHES = (
    (("--stain-normalise", "--format coords"), "coordinates have no pixels"),
    (("--stain-normalise", f"--codec {NATIVE}"), "pixels would not stay as they are"),
    (("--whole", "--format coords"), "coordinates are of tiles"),
    (("--whole", "--overlap"), "there is one region a slide"),
    (("--whole", "--filter"), "filters drop tiles"),
    (("--whole", "--unannotated"), "pixels in no region are background in masks as it is"),
    (("--whole", "--edge pad"), "a region ends with its slide"),
    (("--whole", "--edge shift"), "a region ends with its slide"),
    (
        ("--edge pad", "--format coords"),
        "what is beyond a slide is black to other tools; take --edge shift",
    ),
    (("--edge pad", f"--codec {NATIVE}"), "the slides have no tiles beyond their edges"),
    (("--edge shift", f"--codec {NATIVE}"), "moved tiles would begin within those of the slides"),
)


def _is_given(options: argparse.Namespace, text: str) -> bool:
    name, _, value = text.partition(" ")
    found = getattr(options, name[2:].replace("-", "_"))
    return bool(found == value if value else found)


def _mpp(text: str) -> float:
    low, high = PLAUSIBLE_MPP
    return _between(text, low, high, f"micrometres per pixel, between {low} and {high}")


def _mag(text: str) -> float:
    low, high = (MPP_AT_1X / mpp for mpp in reversed(PLAUSIBLE_MPP))
    return _between(text, low, high, f"the power of an objective, between {low:g} and {high:g}")


def _level(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a level: 0, 1, 2 ...")
    return int(text)


def _fraction(text: str) -> float:
    return _between(text, 0.0, 1.0, "a part, between 0 and 1")


def _between(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
