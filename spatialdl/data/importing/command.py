"""The import command for data of other programs: `spatialdl-import`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spatialdl.common.text import counted, positive_int
from spatialdl.data.codec import CODECS, LEVEL
from spatialdl.data.format import Manifest
from spatialdl.data.importing.clam import import_clam
from spatialdl.data.importing.image_folder import BrokenImagesError, import_images
from spatialdl.data.importing.volumes import import_volumes
from spatialdl.data.options import add_shard_options

_OK, _FAILED = 0, 1
_IMPORTS: dict[str, Callable[..., list[str]]] = {
    "images": import_images,
    "clam": import_clam,
    "volumes": import_volumes,
}
_COMMON = ("labels", "skip_broken", "codec", "quality", "level", "shard_size", "overwrite")
_SETTINGS = {
    "images": (*_COMMON, "mpp", "stripes", "column", "skip_unmatched", "rgb", "jobs"),
    "clam": (*_COMMON, "mpp"),
    "volumes": (*_COMMON, "stripes", "masks"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write a data set from images, patches or volumes.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        0, or 1 if nothing was written.
    """
    options = _parser().parse_args(argv)
    given = {name: getattr(options, name, None) for name in _SETTINGS[options.kind]}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always", UserWarning)
            skipped = _IMPORTS[options.kind](options.inputs, options.out, **settings)
    except BrokenImagesError as error:
        print("\n  ".join([f"error: {error}:", *error.broken]), file=sys.stderr)
        return _FAILED
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    for remark in remarks:
        print(f"remark: {remark.message}", file=sys.stderr)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    made = Manifest.load(options.out)
    of = f" of {len(made.classes)} classes" if made.classes else ""
    masked = " with masks" if made.masks else ""
    what = f"{len(made.samples)} {made.kind}"
    if options.kind == "images":
        what = f"{counted(len(made.samples), 'image')} as {made.kind}"
    print(f"wrote {what}{of}{masked} to {options.out}")
    return _OK


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="spatialdl-import", description="Convert images, patches or volumes to a data set."
    )
    kinds = made.add_subparsers(dest="kind", required=True, metavar="images|clam|volumes")
    images = kinds.add_parser("images", help="a folder of images: class folders, or a table")
    images.add_argument(
        "inputs",
        type=Path,
        metavar="FOLDER",
        help="with CLASS/image.png, or train|val|test/CLASS/image.png; with --labels, images at "
        "any depth",
    )
    images.add_argument(
        "--labels",
        type=Path,
        metavar="CSV",
        help="columns image (or filename, file, ...), label, and optionally split (train, val, "
        "test) and patient",
    )
    images.add_argument(
        "--column", default="label", metavar="NAME", help="column of the labels (default label)"
    )
    images.add_argument(
        "--skip-unmatched",
        action="store_true",
        help="skip images without a label in the table, and labels without an image",
    )
    images.add_argument(
        "--rgb", action="store_true", help="convert all images to three channels of uint8"
    )
    images.add_argument(
        "--jobs", type=positive_int, default=1, metavar="N", help="decoding threads (default 1)"
    )
    images.add_argument(
        "--stripes",
        type=positive_int,
        metavar="N",
        help="write regions, in bands of rows over N shards",
    )
    clam = kinds.add_parser("clam", help="CLAM patch files")
    clam.add_argument(
        "inputs", nargs="+", type=Path, metavar="FILES", help="one per slide, or folders of them"
    )
    clam.add_argument(
        "--labels", type=Path, metavar="CSV", help="columns slide_id,label, and optionally split"
    )
    volumes = kinds.add_parser(
        "volumes", help="a folder of NIfTI, NRRD, TIFF, OME-TIFF, OME-Zarr or DICOM"
    )
    volumes.add_argument(
        "inputs",
        type=Path,
        metavar="FOLDER",
        help="with NAME.nii.gz, .nrrd, .tif, .ome.zarr, or folders NAME of DICOM series",
    )
    volumes.add_argument(
        "--masks", type=Path, metavar="DIR", help="folder with a mask of the same name for each"
    )
    volumes.add_argument(
        "--labels",
        type=Path,
        metavar="CSV",
        help="columns slide_id (NAME), label (may be empty with masks), split",
    )
    volumes.add_argument(
        "--stripes", type=positive_int, metavar="N", help="bands of slices over N shards"
    )
    for parser in (images, clam):
        parser.add_argument(
            "--mpp", type=float, metavar="X", help="micrometres per pixel, if known"
        )
    for parser in (images, clam, volumes):
        _add_common(parser)
    return made


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="data set folder to create")
    add_shard_options(parser, CODECS, "pixels raw, as JPEG, or losslessly compressed")
    add(
        "--level",
        type=positive_int,
        default=LEVEL,
        metavar="N",
        help=f"level for --codec zstd, 1 (fast) to 22 (small) (default {LEVEL})",
    )
    add("--skip-broken", action="store_true", help="skip inputs that cannot be read")
    add("--overwrite", action="store_true", help="replace an existing data set")


if __name__ == "__main__":
    sys.exit(main())
