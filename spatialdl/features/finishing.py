"""End of a run: tables and printed summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spatialdl.features.agreed_errors import FAILED
from spatialdl.features.manifest import Folder
from spatialdl.features.preparing import Prepared
from spatialdl.features.working import WorkerResult
from spatialdl.slides.batch.report import save_reports, table, warnings, why_nothing
from spatialdl.text import counted, print_lines

PROCESS_LIST = "process_list.csv"


def finish(prepared: Prepared, folder: Folder, outcomes: Sequence[WorkerResult]) -> int:
    """Write the tables, print a summary, and return the exit code."""
    reports = sorted((r for one in outcomes for r in one.reports), key=lambda r: r.slide)
    together = folder.finish(reports)
    save_reports(folder.path / PROCESS_LIST, together)
    print_lines(table(reports))
    for line in warnings(reports):
        print(f"warning: {line}", file=sys.stderr)
    tiles = sum(report.written for report in reports)
    if not tiles:
        print(f"error: {why_nothing(reports)}", file=sys.stderr)
        return FAILED
    before = sum(len(one.before) for one in outcomes)
    used = sum(report.written > 0 for report in reports)
    width = prepared.settings["encoder"]["width"]
    done = f", {before} of them by an earlier run" if before else ""
    if prepared.options.whole:
        print_lines(f"maps of {width} features of {counted(used, 'slide')}{done} in {folder.path}")
    else:
        print_lines(
            f"{width} features of each of {counted(tiles, 'tile')} of {counted(used, 'slide')}"
            f"{done} in {folder.path}"
        )
    if line := speed(outcomes):
        print_lines(line)
    failed = any(report.failed for report in reports)
    return FAILED if failed and not prepared.options.skip_errors else 0


def speed(outcomes: Sequence[WorkerResult]) -> str:
    """Throughput of reading and encoding, as text; empty if no tiles were encoded."""
    tiles = sum(one.tiles for one in outcomes)
    reading, encoding, waited = (
        sum(getattr(one, name) for one in outcomes) for name in ("reading", "encoding", "waited")
    )
    seconds = max(one.seconds for one in outcomes)
    if not tiles or not reading or not encoding:
        return ""
    return (
        f"{counted(tiles, 'tile')} in {seconds:.1f} s, {tiles / seconds:,.0f}/s; per encoder "
        f"{tiles / encoding:,.0f}/s, per reading thread {tiles / reading:,.0f}/s; encoders waited "
        f"for tiles {waited / (waited + encoding):.0%} of the time"
    )
