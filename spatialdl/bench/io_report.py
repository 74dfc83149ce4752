"""Table and picture of the `io` benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spatialdl.bench import io_loader, io_memory, io_reading, io_staging, io_writing
from spatialdl.bench.io_strategies import MEMMAP, OURS, PLAIN, PREAD, THROUGH, WAYS
from spatialdl.bench.results import save

_WIDE = 28  # columns of names in the table
_NOT_COLD = "not permitted here: dropped pages stay in memory"
_OURS_BLUE, _GREY, _ORANGE = "#1f5fa8", "#8a8a8a", "#d0862a"
_COLORS = {MEMMAP: _GREY, OURS: _OURS_BLUE, PREAD: "#5d8fca", THROUGH: "#8fb3dc"}
_LINES = {
    io_staging.STAGED: _GREY,
    io_staging.STAGING: _OURS_BLUE,
    io_staging.SOURCE: _ORANGE,
}
_SHADES = ("#c9d9ec", "#7fa6d3", _OURS_BLUE, "#123c6b")


class Aim(NamedTuple):
    """A target and the measured value."""

    what: str
    wanted: float
    found: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


def aims(result: dict[str, Any]) -> Iterator[Aim]:
    """Targets of the parts that ran."""
    if "reading" in result:
        windows, quarters = (
            result["reading"]["warm"][kind] for kind in (io_reading.WINDOWS, io_reading.QUARTERS)
        )
        wanted = io_reading.OF_MEMMAP
        yield Aim(f"windows from {OURS}, to {MEMMAP}", wanted, windows["to_memmap"][OURS])
        yield Aim(f"windows from {OURS}, to plain", io_reading.OF_PLAIN, windows["to_plain"][OURS])
        yield Aim(f"quarters from {OURS}, to {MEMMAP}", wanted, quarters["to_memmap"][OURS])
    if "feeding" in result:
        name, workers = io_loader.WANTED_AT
        for row in result["feeding"]:
            if (row["set"], row["workers"]) == (name, workers):
                what = f"utilisation, {name}, {workers} workers"
                yield Aim(what, io_loader.UTILISATION, row["utilisation"])
    if "staging" in result:
        what = f"epoch {io_staging.STAGING}, to {io_staging.STAGED}"
        yield Aim(what, io_staging.TO_STAGED, result["staging"]["ratio"], at_most=True)
    if "writing" in result:
        yield Aim(f"writing, to {io_writing.FILE}", io_writing.OF_FILE, result["writing"]["ratio"])
    if "memory" in result:
        what = "MB to read a box of a giant"
        yield Aim(what, io_memory.LIMIT, result["memory"]["mb"], at_most=True)


def table(result: dict[str, Any]) -> str:
    """Tables of all parts that ran, and of their targets."""
    lines = [result["command"], f"{result['machine']}, {result['date']}"]
    for part, report in _REPORTS.items():
        if part in result:
            lines += ["", *report(result)]
    lines += ["", f"{'':46}{'target':>12}{'found':>9}"]
    for aim in aims(result):
        sign = "at most" if aim.at_most else "at least"
        missed = "" if aim.is_met else "  missed"
        lines.append(f"{aim.what:46}{sign:>8}{aim.wanted:>6.4g}{aim.found:>7.4g}{missed}")
    return "\n".join(lines)


def _report_reading(result: dict[str, Any]) -> Iterator[str]:
    side, found = result["options"]["side"], result["reading"]
    rows, cold = found["warm"], found["cold"]
    yield f"boxes of an image of {side} x {side} pixels, medians; warm: MB per CPU second from the"
    yield f"page cache; cold: MB per second, {io_reading.WINDOWS} from the disk"
    yield ""
    heads = "".join(f"{kind:>16}{'memmap':>8}{'plain':>7}" for kind in rows)
    yield f"{'':{_WIDE}}{heads}{'cold':>8}{'stored':>8}"
    for way in WAYS:
        cells = "".join(
            f"{row['rates'][way]:16.0f}{row['to_memmap'][way]:8.2f}{row['to_plain'][way]:7.2f}"
            for row in rows.values()
        )
        clock = f"{'-':>8}" if cold is None else f"{cold['rates'][way]:8.0f}"
        yield f"{way:{_WIDE}}{cells}{clock}{found['stored'][way]:8.2f}"
    yield ""
    yield f"memmap, plain: ratio to {MEMMAP} and to {PLAIN}; stored: size to raw pixels"
    if cold is None:
        yield f"cold: {_NOT_COLD}"


def _report_feeding(result: dict[str, Any]) -> Iterator[str]:
    options = result["options"]
    tile, workers = options["tile"], options["workers"]
    yield f"utilisation of an emulated accelerator: {options['batch']} tiles of {tile} x {tile},"
    yield f"{options['compute']:g} s per step; by number of reader processes"
    yield ""
    yield f"{'':{_WIDE}}" + "".join(f"{count:>8}" for count in workers)
    for name in io_loader.SETS:
        found = [row["utilisation"] for row in result["feeding"] if row["set"] == name]
        yield f"{name:{_WIDE}}" + "".join(f"{value:8.3f}" for value in found)


def _report_staging(result: dict[str, Any]) -> Iterator[str]:
    options, found = result["options"], result["staging"]
    yield f"an epoch of {found['mb']:.0f} MB, the source slowed to {options['rate']:g} MB/s"
    yield ""
    yield f"{'':{_WIDE}}{'seconds':>9}{'MB of the source':>19}"
    for row in found["rows"]:
        yield f"{row['way']:{_WIDE}}{row['seconds']:9.2f}{row['served'] / 1e6:19.0f}"


def _report_writing(result: dict[str, Any]) -> Iterator[str]:
    found = result["writing"]
    yield f"writing {found['mb']:.0f} MB of raw tiles, MB per second until they are on the disk"
    yield ""
    for way in io_writing.WAYS:
        after = f", {found['shards']} shards, SHA-256" if way == io_writing.OURS else ""
        yield f"{way + after:{_WIDE}}{found['rates'][way]:9.0f}"


def _report_memory(result: dict[str, Any]) -> Iterator[str]:
    found, box = result["memory"], io_memory.BOX
    yield f"a box of {box} x {box} of an image of {found['side']} x {found['side']} pixels:"
    yield f"peak {found['peak']:.0f} MB, {found['mb']:.0f} MB more than after the imports"


_REPORTS = {
    "reading": _report_reading,
    "feeding": _report_feeding,
    "staging": _report_staging,
    "writing": _report_writing,
    "memory": _report_memory,
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw one panel per part; three for reading."""
    from matplotlib.figure import Figure

    wide = 3 if "reading" in result else 0
    small = [part for part in _PANELS if part in result]
    figure = Figure(figsize=(15, 4.2 * (bool(wide) + bool(small))), dpi=130, layout="constrained")
    rows = figure.subfigures(bool(wide) + bool(small), 1, squeeze=False)[:, 0]
    if wide:
        _draw_reading(result["reading"], rows[0].subplots(1, wide))
    if small:
        panels = rows[-1].subplots(1, len(small), squeeze=False)[0]
        for part, panel in zip(small, panels, strict=True):
            _PANELS[part](result, panel)
    for panel in figure.axes:
        panel.title.set_fontsize(10)
    save(figure, path)


def _draw_reading(found: dict[str, Any], panels: Any) -> None:
    warm = [(f"{kind}, page cache warm", row) for kind, row in found["warm"].items()]
    units = ["MB per CPU second"] * len(warm) + ["MB per second"]
    cold = (f"{io_reading.WINDOWS}, cold", found["cold"])
    for (title, row), unit, panel in zip([*warm, cold], units, panels, strict=True):
        panel.set_title(title)
        if row is None:
            panel.text(0.5, 0.5, _NOT_COLD.replace(": ", ":\n"), ha="center", fontsize=8)
            panel.set_axis_off()
            continue
        rates = [row["rates"][way] for way in reversed(WAYS)]
        colors = [_COLORS.get(way, _ORANGE) for way in reversed(WAYS)]
        bars = panel.barh([*reversed(WAYS)], rates, color=colors, height=0.7)
        ratios = [row["to_memmap"][way] for way in reversed(WAYS)]
        shown = [f"{rate:.0f} ({ratio:.2f})" for rate, ratio in zip(rates, ratios, strict=True)]
        panel.bar_label(bars, shown, fontsize=8, padding=2)
        panel.set_xlabel(f"{unit} (ratio to memmap)", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.margins(x=0.3)


def _draw_feeding(result: dict[str, Any], panel: Any) -> None:
    workers, names = result["options"]["workers"], list(io_loader.SETS)
    width = 0.8 / len(workers)
    for place, count in enumerate(workers):
        found = [row["utilisation"] for row in result["feeding"] if row["workers"] == count]
        at = [number + (place - (len(workers) - 1) / 2) * width for number in range(len(names))]
        color, label = _SHADES[place % len(_SHADES)], f"{count} worker{'s' * (count != 1)}"
        bars = panel.bar(at, found, width * 0.92, color=color, label=label)
        panel.bar_label(bars, [f"{value:.2f}" for value in found], fontsize=6.5)
    panel.axhline(io_loader.UTILISATION, color="k", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    panel.set_ylim(0, 1.3)
    panel.legend(frameon=False, fontsize=8, loc="upper center", ncols=len(workers))
    panel.set_title("utilisation of the accelerator")


def _draw_staging(result: dict[str, Any], panel: Any) -> None:
    for row in result["staging"]["rows"]:
        ends, way = row["ends"], row["way"]
        label = f"{way}: {row['seconds']:.1f} s"
        panel.plot(ends, range(1, len(ends) + 1), color=_LINES[way], label=label)
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("seconds", fontsize=9)
    panel.set_ylabel("steps done", fontsize=9)
    panel.legend(frameon=False, fontsize=8)
    panel.set_title(f"an epoch, source at {result['options']['rate']:g} MB/s")


def _draw_writing(result: dict[str, Any], panel: Any) -> None:
    rates = result["writing"]["rates"]
    _bars(panel, {way: rates[way] for way in io_writing.WAYS}, [_GREY, _OURS_BLUE])
    panel.set_title("writing raw tiles, MB per second")


def _draw_memory(result: dict[str, Any], panel: Any) -> None:
    found = result["memory"]
    _bars(panel, {"imports": found["imports"], "box": found["mb"]}, [_GREY, _OURS_BLUE])
    panel.axhline(io_memory.LIMIT, xmin=0.5, color="k", linewidth=0.8, linestyle=":")
    panel.set_title(f"MB to read {io_memory.BOX}² of {found['side']}²")


def _bars(panel: Any, heights: dict[str, float], colors: list[str]) -> None:
    bars = panel.bar([*heights], [*heights.values()], color=colors, width=0.6)
    panel.bar_label(bars, [f"{height:.0f}" for height in heights.values()], fontsize=8)
    panel.tick_params(labelsize=8)
    panel.margins(y=0.12)


_PANELS = {
    "feeding": _draw_feeding,
    "staging": _draw_staging,
    "writing": _draw_writing,
    "memory": _draw_memory,
}
