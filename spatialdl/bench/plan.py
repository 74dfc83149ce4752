"""Memory and time predicted by `spatialdl.plan` against those of `spatialdl.train`.

The machine is calibrated first. Calibration and runs both use the fastest repetition, as other
processes on a shared machine only slow them down.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from tqdm import tqdm

from spatialdl.bench.results import origin, parser_of, publish, save
from spatialdl.planning.calibrate import calibrate, measured
from spatialdl.planning.cluster import Cluster, cluster_of
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import job_of
from spatialdl.planning.worker import run
from spatialdl.training.layouts import placement_of, schedule_of

R18 = ("model=resnet18", "data.image_size=[448,512]", "data.batch_size=4")
LARGE = ("model=resnet18", "data.image_size=[1024,1024]", "data.batch_size=1")
R50 = ("model=resnet50", "data.image_size=[384,384]", "data.batch_size=2")
R110 = ("model=resnet110_v2", "data.image_size=[256,256]", "data.batch_size=2")
UNET = ("model=unet", "model.width=16", "data.image_size=[320,320]", "data.batch_size=2")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "none": (*R18, "parallel=none"),
    "dp": (*R18, "parallel=dp"),
    "sp 2x1": (*R18, "parallel=sp"),
    "lp": (*R18, "parallel=lp"),
    "pp gpipe": (*R18, "parallel=pp"),
    "pp 1f1b": (*R18, "parallel=pp", "parallel.schedule=1f1b"),
    "gems mast": (*R18, "parallel=gems"),
    "sp+lp": (*R18, "parallel=sp+lp"),
    "channels": (*R18, "parallel=none", "parallel.tensor=2"),
    "lp, late channels": (*R18, "parallel=lp", "parallel.tensor=[1,2]"),
    "recompute block": (*R18, "parallel=none", "parallel.recompute=block"),
    "pp recompute stage": (*R18, "parallel=pp", "parallel.recompute=stage"),
    "resnet18, 1 image": (*LARGE, "parallel=none"),
    "resnet18, 1 image, sp": (*LARGE, "parallel=sp"),
    "resnet50": (*R50, "parallel=none"),
    "resnet50 dp": (*R50, "parallel=dp"),
    "resnet110_v2": (*R110, "parallel=none"),
    "unet sp": (*UNET, "parallel=sp"),
    "unet lp": (*UNET, "parallel=lp"),
    "unet sp+pp": (*UNET, "parallel=sp+pp", "parallel.microbatches=2"),
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    settings = measured() if options.keep else None
    cluster = cluster_of(settings or calibrate())
    rows = []
    with tqdm(options.only or list(LAYOUTS), desc="layouts", unit="layout") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            rows.append({"name": name, **_row(LAYOUTS[name], cluster, options.steps)})
    result = {
        **origin("plan", arguments),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    publish(result, table, draw, Path(options.out) / "plan")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("plan", __doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps per run (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="use the existing calibration")
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), help="layouts to run (all)")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        raise ValueError(f"--steps {options.steps} must be at least 2: the first is a warm-up")
    return options


def _row(overrides: Sequence[str], cluster: Cluster, steps: int) -> dict[str, Any]:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*overrides, "device=cpu"])
    job = job_of(config, cluster)
    placement = placement_of(config.parallel)
    found = predict(
        job,
        cluster,
        placement,
        schedule_of(config.parallel, placement),
        config.parallel.recompute,
    )
    real = _trained(overrides, job, steps)
    return {
        "overrides": list(overrides),
        "ranks": placement.world_size,
        "predicted_mb": max(found.memory) / 2**20,
        "measured_mb": max(real["peak_memory_mb"]),
        "predicted_mb_of_ranks": [one / 2**20 for one in found.memory] * placement.data,
        "measured_mb_of_ranks": real["peak_memory_mb"],
        "predicted_s": found.seconds,
        "measured_s": min(real["seconds"][1:]),
        "seconds": real["seconds"],
    }


def _trained(overrides: Sequence[str], job: PlannedJob, steps: int) -> dict[str, Any]:
    """Peak memory of each rank, and seconds of each step, of a real run."""
    given = [f"data.samples={job.batch * steps}", "data.validation_samples=0", "device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        given += [
            f"trainer.max_steps={steps}",
            f"hydra.run.dir={path}",
            "trainer.checkpoint.keep=0",
        ]
        command = [sys.executable, "-m", "spatialdl.train", *overrides, *given]
        run(command, dict(os.environ))
        summary = json.loads((path / "summary.json").read_text())
        with (path / "metrics.csv").open() as file:
            rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    seconds = [job.batch / rate for rate in rates]
    return {"peak_memory_mb": summary["peak_memory_mb"], "seconds": seconds}


def off(row: dict[str, Any], unit: str) -> float:
    """Relative error of the prediction."""
    return float(row[f"predicted_{unit}"] / row[f"measured_{unit}"] - 1)


def table(result: dict[str, Any]) -> str:
    """Table with a line per layout."""
    rows = result["rows"]
    lines = [
        result["command"],
        f"{result['machine']}, {result['date']}, load {result['load']:.1f} at the end",
        "",
        f"{'':24}{'':>6}{'memory of the largest rank, MB':>32}{'time of a step, s':>30}",
        f"{'':24}{'ranks':>6}{'predicted':>12}{'measured':>11}{'off':>8}{'predicted':>14}"
        f"{'measured':>11}{'off':>8}",
    ]
    for row in rows:
        lines.append(
            f"{row['name']:24}{row['ranks']:6}{row['predicted_mb']:12.0f}{row['measured_mb']:11.0f}"
            f"{off(row, 'mb'):+8.0%}{row['predicted_s']:14.2f}{row['measured_s']:11.2f}"
            f"{off(row, 's'):+8.0%}"
        )
    close = [sum(abs(off(row, unit)) <= most for row in rows) for unit, most in TARGETS.items()]
    lines.append(
        f"\nmemory within {TARGETS['mb']:.0%}: {close[0]} of {len(rows)}; "
        f"time within {TARGETS['s']:.0%}: {close[1]} of {len(rows)}"
    )
    return "\n".join(lines)


TARGETS = {"mb": 0.1, "s": 0.2}


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot predicted over measured values, with bands of the target accuracy."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9.5, 4.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"mb": "peak memory of the largest rank, MB", "s": "time of a step, s"}
    for panel, (unit, title) in zip(panels, titles.items(), strict=True):
        x = [row[f"measured_{unit}"] for row in result["rows"]]
        y = [row[f"predicted_{unit}"] for row in result["rows"]]
        ends = [0.7 * min(x + y), 1.4 * max(x + y)]
        near = TARGETS[unit]
        low, high = [(1 - near) * end for end in ends], [(1 + near) * end for end in ends]
        panel.fill_between(ends, low, high, color="0.9", label=f"within {near:.0%}")
        panel.plot(ends, ends, color="0.6", linewidth=0.8)
        for number, (row, a, b) in enumerate(zip(result["rows"], x, y, strict=True)):
            panel.plot([a], [b], "o", color="#1f5fa8", markersize=4)
            panel.annotate(
                str(number + 1), (a, b), xytext=(4, 3), textcoords="offset points", fontsize=7
            )
            if unit == "mb":
                panel.plot([], [], " ", label=f"{number + 1} {row['name']}")
        panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("measured")
        panel.set_ylabel("predicted")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside right upper",
        fontsize=7,
        frameon=False,
        handlelength=1.0,
    )
    save(figure, path)
