"""Picture of the `whole_vs_tiles` benchmark: classes, accuracy and memory."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spatialdl.slides.synthetic.drawing import ARRANGEMENTS, write_synthetic_slide

COLORS = {"whole": "#1f5fa8", "tiles": "#d0862a"}
_SEED = 3  # seed of the slides shown
_FACTOR = 4  # downsampling factor


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a slide of each class with a tile, accuracy over epochs, memory over ranks."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.titlesize": 10.5, "axes.labelsize": 10}):
        figure = Figure(figsize=(10, 3.1), dpi=160, layout="constrained")
        panels = figure.subplots(1, 4, width_ratios=(1, 1, 1.35, 0.8))
        for panel, kind in zip(panels, ARRANGEMENTS, strict=False):
            _show(panel, kind, result["side"], result["tile"])
        _draw_accuracy(panels[2], result)
        _draw_memory(panels[3], result["memory_mb"])
        figure.savefig(path)


def _show(panel: Any, kind: str, side: int, tile: int) -> None:
    """Draw a slide, and the size of a tile."""
    import tifffile
    from matplotlib.patches import Rectangle

    with tempfile.TemporaryDirectory() as name:
        slide = Path(name) / "slide.tif"
        write_synthetic_slide(slide, kind, (side, side), seed=_SEED)
        image = tifffile.imread(slide, key=0)
    small = side // _FACTOR
    image = image.reshape(small, _FACTOR, small, _FACTOR, 3).mean((1, 3)).astype("uint8")
    panel.imshow(image, extent=(0, side, side, 0))
    panel.add_patch(Rectangle((side // 4, side // 4), tile, tile, fill=False, linewidth=2))
    panel.set_title(f"slide of the class {kind}")
    panel.set_xticks([])
    panel.set_yticks([])
    panel.set_xlabel(f"{side} x {side} pixels\nblack: a tile of {tile} x {tile}")


def _draw_accuracy(panel: Any, result: dict[str, Any]) -> None:
    """Plot means over the seeds as lines, with bands from the worst to the best seed."""
    from matplotlib.patches import Patch

    seeds = result["options"]["seeds"]
    for name, arm in result["found"].items():
        curves = [run["curve"] for run in result["runs"] if run["arm"] == name]
        by_epoch = [[100 * value for value in values] for values in zip(*curves, strict=True)]
        epochs = range(1, len(by_epoch) + 1)
        lowest, highest = [min(v) for v in by_epoch], [max(v) for v in by_epoch]
        panel.fill_between(epochs, lowest, highest, color=COLORS[name], alpha=0.25, linewidth=0)
        means = [statistics.mean(values) for values in by_epoch]
        panel.plot(epochs, means, color=COLORS[name], linewidth=2, label=arm["title"])
    panel.axhline(50, color="#8a8a8a", linewidth=1, linestyle="dotted", label="chance")
    panel.set_ylim(0, 104)
    panel.set_xlabel("epoch")
    panel.set_ylabel("validation slides, %")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_title(f"correctly classified (mean of {seeds} runs)")
    handles = [
        *panel.get_legend_handles_labels()[0],
        Patch(color="#c4c8cd", label="worst to best run"),
    ]
    panel.legend(handles=handles, frameon=False, loc="lower right", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_memory(panel: Any, memory: dict[str, float]) -> None:
    ranks: Sequence[str] = list(memory)
    gigabytes = [memory[count] / 1024 for count in ranks]
    bars = panel.bar(ranks, gigabytes, color=COLORS["whole"], width=0.6)
    panel.bar_label(bars, [f"{value:.1f}" for value in gigabytes])
    panel.margins(y=0.12)
    panel.set_xlabel("ranks per whole image")
    panel.set_title("memory per rank, GB")
    panel.set_yticks([])
    panel.spines[["top", "right", "left"]].set_visible(False)
