"""The command that cuts slides into a data set: `spatialdl-tile`, `tools/tile_slides.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path

from spatialdl.comm.launch import launched
from spatialdl.common.text import counted, print_lines, readable_bytes
from spatialdl.data.folder import ResumableFolder, holds_results
from spatialdl.data.options import stripe_files
from spatialdl.data.outcomes import FAILED, MISUSED, OK, EmptyResultError, exit_code, run_command
from spatialdl.slides.batch.assembly import PAGE, PROCESS_LIST, assemble, load_settings
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.finding_slides import SlideLabel, find_slides, read_labels, slide_names
from spatialdl.slides.batch.record import (
    PICTURES,
    holds_work,
    keep_failed,
    keep_others,
    names_in,
)
from spatialdl.slides.batch.report import TilingReport, save_reports, table, warnings, why_nothing
from spatialdl.slides.batch.report_page import save_batch
from spatialdl.slides.batch.run import BatchRun, batch_executor, executor_of_ranks
from spatialdl.slides.batch.steps import BatchRequest, Task
from spatialdl.slides.batch.tile_options import parsed, parsed_path, settings_of
from spatialdl.slides.cohort.leaks import check_duplicates, check_patients, check_pictures
from spatialdl.slides.finding.annotations import BACKGROUND
from spatialdl.slides.inspection import inspect, verify
from spatialdl.slides.reading.paths import slide_bytes

_TOOLS: dict[str, Callable[[Path], object]] = {"inspect": inspect, "verify": verify}


def main(argv: Sequence[str] | None = None) -> int:
    """Cut slides into a data set folder.

    Under mpiexec or srun all ranks call it: rank 0 schedules the work, all other ranks execute
    it. With "inspect" or "verify" as first argument it inspects or verifies a path instead.

    Args:
        argv: arguments of the command; None uses those of the process.

    Returns:
        The exit code: 0 if every slide could be used, 1 if some could not (0 with
        `--skip-errors`) or no tissue was found, 2 for invalid arguments or files, 130 or 143 if
        interrupted or terminated.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _TOOLS:
        return _run_tool(argv[0], argv[1:])
    try:
        with executor_of_ranks() as (first, executor):
            run = partial(_prepare_and_run, argv, executor)
            return run_command(run, "nothing was written") if first else OK
    except ValueError as error:
        world = launched()
        if world is None or world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return MISUSED


def _run_tool(tool: str, argv: Sequence[str]) -> int:
    path = parsed_path(tool, argv)
    try:
        result = _TOOLS[tool](path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print_lines(str(result))
    return OK if result else FAILED


def _prepare_and_run(argv: Sequence[str], executor: Executor | None) -> int:
    options = parsed(argv)
    slides = find_slides(options.slides, recursive=options.recursive)
    slides, labels = _labelled(options, slides)
    choosing = Choosing(options, slides, outside=options.unannotated == BACKGROUND)
    labels = _with_classes(options, labels, choosing)
    batch = _batch(options, labels, choosing)
    checked = options.labels is not None and not options.allow_leaks
    if checked:
        check_patients(options.labels)
    for line in check_duplicates(slides, labels, batch.before, allowed=options.allow_leaks):
        print(f"warning: {line}", file=sys.stderr)
    if checked:
        check_pictures(labels, batch.before, jobs=options.jobs)
    tasks = [
        Task(slide, name, labels.get(slide), slide_bytes(slide))
        for slide, name in slide_names(slides).items()
    ]
    tasks.sort(key=lambda task: task.name)
    return (_count if options.dry_run else _tile)(batch, tasks, executor)


def _labelled(
    options: argparse.Namespace, slides: list[Path]
) -> tuple[list[Path], dict[Path, SlideLabel]]:
    """Return the slides to cut and their labels, if there are any."""
    if options.labels is None:
        if options.unlabelled == "skip":
            raise ValueError("--unlabelled skip requires --labels")
        return slides, {}
    labels = read_labels(
        options.labels,
        slides,
        unlabelled=options.unlabelled,
        classes=options.annotations is None,
    )
    skipped = [slide.name for slide in slides if slide not in labels]
    if skipped:
        count = counted(len(skipped), "slide")
        print(f"remark: skipped {count} without a label: {', '.join(skipped)}", file=sys.stderr)
    return [slide for slide in slides if slide in labels], labels


def _with_classes(
    options: argparse.Namespace, labels: dict[Path, SlideLabel], choosing: Choosing
) -> dict[Path, SlideLabel]:
    """Return the labels, without their classes if annotations have classes.

    Raises:
        ValueError: neither annotations nor labels have classes.
    """
    if not choosing.classes:
        empty = [slide.name for slide, label in labels.items() if not label.label]
        if empty:
            raise ValueError(
                f"{options.labels} has an empty label for {', '.join(empty)}, and no region of "
                f"--annotations {options.annotations} has a class; add labels or classes"
            )
        return labels
    if any(label.label for label in labels.values()):
        print(
            f"remark: using the classes of the annotations ({', '.join(choosing.classes)}); the "
            f"labels in {options.labels} are ignored, its splits are used",
            file=sys.stderr,
        )
    return {slide: label._replace(label="") for slide, label in labels.items()}


def _batch(
    options: argparse.Namespace,
    labels: Mapping[Path, SlideLabel],
    choosing: Choosing,
) -> BatchRequest:
    classes = choosing.classes or sorted({label.label for label in labels.values()})
    settings = settings_of(options, classes)
    target = options.out.resolve()
    is_same = not options.overwrite and load_settings(target) == settings
    before = target if is_same else None
    return BatchRequest(options, choosing, settings, classes, target, before)


def _count(batch: BatchRequest, tasks: Sequence[Task], executor: Executor | None) -> int:
    """Print what would be written."""
    run, reports = _run(batch, tasks, executor, dry=True)
    _print(reports)
    new = [report.written for report in reports if report.slide not in run.before]
    packed = " before compression" if batch.options.codec != "raw" else ""
    size = readable_bytes(run.bytes) + packed
    what = _what(batch, sum(new), sum(map(bool, new)))
    print_lines(f"would write {what}, {size}, to {batch.target}")
    return exit_code(reports, skip_errors=batch.options.skip_errors)


def _tile(batch: BatchRequest, tasks: Sequence[Task], executor: Executor | None) -> int:
    overwrite = batch.options.overwrite
    folder = ResumableFolder(batch.target, overwrite=overwrite, settings=batch.settings)
    batch = replace(batch, built_in=folder.path, before=folder.before)
    try:
        undone = stripe_files(folder.path, batch.options.stripe_count, batch.options.stripe_size)
        if undone:
            print(f"remark: {undone}", file=sys.stderr)
        return _into(folder, batch, tasks, executor)
    except (KeyboardInterrupt, OSError) as error:
        keeps, kept = holds_work(folder.path), "nothing was written"
        if keeps:
            kept = f"partial results are in {folder.path}; run the same command again to resume"
        if isinstance(error, KeyboardInterrupt):
            error.add_note(kept)
        elif keeps:
            raise OSError(f"{error}; {kept}") from error
        else:
            folder.discard()
        raise
    finally:
        folder.leave()


def _into(
    folder: ResumableFolder, batch: BatchRequest, tasks: Sequence[Task], executor: Executor | None
) -> int:
    resumed = names_in(folder.path)  # slides done by an interrupted run
    others = keep_others(folder.path, batch.before, {task.name: task.path for task in tasks})
    run, reports = _run(batch, tasks, executor, dry=False)
    done = {*run.before, *run.finished}
    failed = {name: report for name, report in run.reports.items() if name not in done}
    kept = keep_failed(folder.path, batch.before, failed)
    others += [report for report in kept.values() if report is not None]
    _print(reports)
    code = exit_code(reports, skip_errors=batch.options.skip_errors)
    names = sorted({*done, *kept, *(report.slide for report in others)})
    if batch.before and not (resumed or run.finished) and names == names_in(batch.before):
        folder.discard()
        print_lines(f"nothing to do: {batch.target} is complete")
        return code
    all_reports = sorted([*reports, *others], key=lambda report: report.slide)
    written = sum(report.written for report in all_reports)
    if not written and holds_results(batch.target):
        folder.discard()
        raise EmptyResultError(why_nothing(reports))
    assemble(folder.path, names, batch.classes, batch.options, batch.settings)
    save_reports(folder.path / PROCESS_LIST, all_reports)
    shown = {name: value for name, value in batch.settings.items() if value}
    save_batch(folder.path / PAGE, all_reports, folder.path / PICTURES, shown)
    folder.publish()
    if not written:
        raise EmptyResultError(f"{why_nothing(reports)}; pictures and {PAGE} are in {batch.target}")
    used = sum(report.written > 0 for report in all_reports)
    print_lines(f"wrote {_what(batch, written, used)} to {batch.target}")
    return code


def _run(
    batch: BatchRequest, tasks: Sequence[Task], executor: Executor | None, *, dry: bool
) -> tuple[BatchRun, list[TilingReport]]:
    run = BatchRun(batch, tasks, dry=dry)
    with batch_executor(batch.options.jobs, executor) as workers:
        run.go(workers)
    return run, [run.reports[task.name] for task in tasks]


def _print(reports: Sequence[TilingReport]) -> None:
    print_lines(table(reports))
    for line in warnings(reports):
        print(f"warning: {line}", file=sys.stderr)


def _what(batch: BatchRequest, samples: int, slides: int) -> str:
    if batch.options.whole:
        return f"{samples} whole regions"
    of = "coordinates of " if batch.options.format == "coords" else ""
    return f"{of}{samples} tiles of {slides} slides"


if __name__ == "__main__":
    sys.exit(main())
