"""The command that cuts slides into a data set: `spatialdl-tile`, `tools/tile_slides.py`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from spatialdl.data.writer import DEFAULT_SHARD_SIZE, ShardWriter
from spatialdl.errors import SlideError
from spatialdl.slides.batch.choosing import KEPT, Choosing, add_options
from spatialdl.slides.batch.labels import SlideLabel, read_labels
from spatialdl.slides.batch.picture import save_picture
from spatialdl.slides.batch.report import Report, save_reports, table, warnings, why_nothing
from spatialdl.slides.cutting.tiling import TilePlan, cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import MPP_AT_1X, PLAUSIBLE_MPP, Wanted

SUFFIXES = (
    *(".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".ndpis", ".scn", ".svs", ".svslide"),
    *(".tif", ".tiff", ".vms", ".vmu", ".zvi"),
)
_OK, _FAILED, _MISUSED = 0, 1, 2
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Cut slides into a data set folder.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0 when every slide could be used, 1 when some could not (with
        `--skip-errors` that is 0 too) or no tissue was found, 2 for a mistake in the arguments
        or files given.
    """
    options = _parser().parse_args(argv)
    try:
        slides = find_slides(options.slides)
        labels = read_labels(options.labels, slides) if options.labels else {}
        choosing = Choosing(options, slides, labelled=bool(labels))
        return _tile(options, slides, labels, choosing)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED if isinstance(error, (_EmptyError, OSError)) else _MISUSED
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def find_slides(given: Sequence[Path]) -> list[Path]:
    """Files as given, folders by the slides in them, in order of their names.

    Raises:
        ValueError: a path is missing, a folder has no slides, or two slides share a name.
    """
    slides: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise ValueError(
                    f"folder {path} has no slides in it ({' '.join(SUFFIXES)}); other images are "
                    "named themselves"
                )
            slides.extend(inside)
        elif not path.exists():
            raise ValueError(f"cannot find slide {path}: there is no such file or folder")
        else:
            slides.append(path)
    slides = list(dict.fromkeys(slides))
    names = [slide.name for slide in slides]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"two slides are named {twice[0]}; tiles are told apart by that name, rename one"
        )
    return slides


class _EmptyError(ValueError):
    """No slide gave a tile."""


class _Run:
    """One run of the command: tiles go from slides to the writer, reports are kept."""

    def __init__(
        self,
        options: argparse.Namespace,
        labels: Mapping[Path, SlideLabel],
        choosing: Choosing,
        writer: ShardWriter,
    ) -> None:
        self._options = options
        self._choosing = choosing
        self._labels = labels
        self._writer = writer
        # no bar where nobody looks at it
        self._bar = tqdm(total=0, unit="tile", disable=None, leave=False)

    def slides(self, slides: Sequence[Path]) -> list[Report]:
        """Cut all slides."""
        with self._bar:
            pairs = zip(slides, _names(slides), strict=True)
            return [self._slide(path, name) for path, name in pairs]

    def _slide(self, path: Path, name: str) -> Report:
        options, report = self._options, Report(name)
        try:
            given = self._labels[path].mpp if path in self._labels else None
            with Slide(path, given or options.slide_mpp) as slide:
                plan = plan_tiles(
                    slide,
                    options.tile_size,
                    Wanted(options.mpp, options.mag, options.level),
                    options.min_tissue,
                    overlap=options.overlap,
                    finder=self._choosing.finder(slide),
                    regions=self._choosing.regions(slide),
                )
                report.mpp, report.remark = slide.known_mpp, slide.remark
                self._cut(slide, plan, report)
        except SlideError as error:
            report.failed, report.note = True, str(error)
        return report

    def _cut(self, slide: Slide, plan: TilePlan, report: Report) -> None:
        report.in_grid, report.note = plan.in_grid, plan.reason
        report.with_tissue, report.unannotated = plan.with_tissue, plan.unannotated
        finish = self._choosing.finish(slide, plan)
        self._bar.set_description(report.slide)
        self._bar.total += len(plan.places)
        label, split = self._labels.get(slide.path, (None, None))[:2]
        taken, dropped, unreadable = [], [], []
        for tile in cut_tiles(slide, plan):
            self._bar.update()
            place = (tile.x, tile.y)
            if tile.problem:
                unreadable.append(place)
                report.failed, report.note = True, tile.problem
            elif tile.image is None:
                report.with_tissue -= 1
            elif refused := self._choosing.refused(tile.image):
                dropped.append(place)
                setattr(report, refused, getattr(report, refused) + 1)
            else:
                image = finish(tile.image)
                label_or_own = label or tile.label
                self._writer.add(image, label_or_own, split, slide=report.slide, xy=place)
                taken.append(place)
        report.written, report.unreadable = len(taken), len(unreadable)
        if not taken and not report.note:
            report.note = "filters dropped every tile" if dropped else "no tissue found"
        picture = self._writer.workdir / "pictures" / f"{report.slide}.png"
        regions = self._choosing.regions(slide) or ()
        save_picture(picture, plan, taken, unreadable, dropped, regions)


def _tile(
    options: argparse.Namespace,
    slides: list[Path],
    labels: Mapping[Path, SlideLabel],
    choosing: Choosing,
) -> int:
    kept = ("tile_size", "mpp", "mag", "level", "min_tissue", "slide_mpp", "shard_size", *KEPT)
    given = {name: getattr(options, name) for name in kept}
    writer = ShardWriter(
        options.out,
        sorted({label.label for label in labels.values()}) or choosing.classes,
        mpp=options.mpp,
        shard_size=options.shard_size,
        overwrite=options.overwrite,
        made_with={k: str(v) if isinstance(v, Path) else v for k, v in given.items()},
    )
    with writer:
        reports = _Run(options, labels, choosing, writer).slides(slides)
        print(table(reports))
        for line in warnings(reports):
            print(f"warning: {line}", file=sys.stderr)
        if not len(writer):
            raise _EmptyError(why_nothing(reports))
        save_reports(writer.workdir / "slides.csv", reports)
    used = sum(report.written > 0 for report in reports)
    print(f"wrote {len(writer)} tiles of {used} slides to {writer.path}")
    failed = any(report.failed for report in reports)
    return _FAILED if failed and not options.skip_errors else _OK


def _names(slides: Sequence[Path]) -> list[str]:
    """What slides are called in the data set: without suffix where that is enough."""
    stems = [slide.stem for slide in slides]
    return [
        slide.name if stems.count(stem) > 1 else stem
        for slide, stem in zip(slides, stems, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spatialdl-tile", description="Cut slides into a data set of tiles."
    )
    add = parser.add_argument
    add("slides", nargs="+", type=Path, metavar="SLIDES", help="slides, or folders of slides")
    add("--out", required=True, type=Path, metavar="DIR", help="data set folder to make")
    add(
        "--tile-size",
        required=True,
        type=_positive_int,
        metavar="N",
        help="rows and columns of a tile",
    )
    wanted = parser.add_mutually_exclusive_group(required=True).add_argument
    wanted("--mpp", type=_mpp, metavar="X", help="micrometres per pixel of the tiles")
    wanted(
        "--mag",
        type=_mag,
        metavar="X",
        help="power of the objective that the tiles are as if taken with, such as 20; that of the "
        "slide is what it says, else 10 / its mpp",
    )
    wanted("--level", type=_level, metavar="N", help="level of the slides, 0 the finest")
    add(
        "--labels",
        type=Path,
        metavar="CSV",
        help="columns slide,label,split (train, val, test), and mpp if wanted: micrometres per "
        "level-0 pixel, before --slide-mpp",
    )
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
    add(
        "--shard-size",
        type=_bytes,
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="about how large a shard file may be, such as 256M or 1G (default 512M)",
    )
    add_options(parser)
    add("--overwrite", action="store_true", help="replace a data set that is there")
    add("--skip-errors", action="store_true", help="exit with 0 although slides were skipped")
    return parser


def _positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


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


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


if __name__ == "__main__":
    sys.exit(main())
