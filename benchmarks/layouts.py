"""Images per second, memory and predicted costs of layouts, for any keys of `spatialdl.train`.

Training repeats one batch, without loading data. Steps are timed in rounds, and reported as in
other synthetic benchmarks: mean of the rounds, and 1.96 standard deviations. Keys with several
values, such as parallel=none,sp, are compared: configurations alternate, each on newly launched
ranks. ``--set`` compares listed layouts. Of layouts with stages, *ideal* is simulated from the
measured times of their actions, without waits, averaging and updates. ``--predict`` adds the
planner's costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf
from torch import nn

from benchmarks.harness import (
    Bars,
    add_numbers,
    alternate,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    short,
    start,
)
from spatialdl import models
from spatialdl.comm.launch import launched, start_ranks
from spatialdl.common.configuring.overrides import check_overrides
from spatialdl.common.configuring.own_keys import fit_model_keys, rewritten
from spatialdl.layout.placement import Placement
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import MEASURED, choose_alone, cluster_file, cluster_named, job_of
from spatialdl.training.checks import check_config
from spatialdl.training.layouts import placement_of, schedule_of

WORKER = "benchmarks.layouts_worker"
SPREAD = 1.96
"""Standard deviations of the 95 % interval of a normal distribution."""
WITHIN = {"memory": 0.1, "time": 0.2}
"""Targets of predictions: relative deviation of memory and time."""

R18 = "model=resnet18 data.image_size=[448,512] data.batch_size=4"
LARGE = "model=resnet18 data.image_size=[1024,1024] data.batch_size=1"
R50 = "model=resnet50 data.image_size=[384,384] data.batch_size=2"
R110 = "model=resnet110_v2 data.image_size=[256,256] data.batch_size=2"
UNET = "model=unet model.width=16 data.image_size=[320,320] data.batch_size=2"
STAGES = "model=resnet18 data.image_size=[512,512]"
EIGHT = "data.batch_size=8 parallel.microbatches=8"
DENSE = "model._target_=benchmarks.layouts.dense_layers data.image_size=[7,7] data.channels=512"
LATE = "model._target_=benchmarks.layouts.last_stage data.image_size=[128,128] data.channels=1024"
SETS: dict[str, dict[str, str]] = {
    "twenty": {
        "none": f"{R18} parallel=none",
        "dp": f"{R18} parallel=dp",
        "sp 2x1": f"{R18} parallel=sp",
        "lp": f"{R18} parallel=lp",
        "pp gpipe": f"{R18} parallel=pp",
        "pp 1f1b": f"{R18} parallel=pp parallel.schedule=1f1b",
        "gems mast": f"{R18} parallel=gems",
        "sp+lp": f"{R18} parallel=sp+lp",
        "channels": f"{R18} parallel=none parallel.tensor=2",
        "lp, late channels": f"{R18} parallel=lp parallel.tensor=[1,2]",
        "recompute block": f"{R18} parallel=none parallel.recompute=block",
        "pp recompute stage": f"{R18} parallel=pp parallel.recompute=stage",
        "resnet18, 1 image": f"{LARGE} parallel=none",
        "resnet18, 1 image, sp": f"{LARGE} parallel=sp",
        "resnet50": f"{R50} parallel=none",
        "resnet50 dp": f"{R50} parallel=dp",
        "resnet110_v2": f"{R110} parallel=none",
        "unet sp": f"{UNET} parallel=sp",
        "unet lp": f"{UNET} parallel=lp",
        "unet sp+pp": f"{UNET} parallel=sp+pp parallel.microbatches=2",
    },
    "stages": {  # micro-batches of one image
        "layer parallel": f"{STAGES} parallel=lp data.batch_size=1",
        "GPipe": f"{STAGES} parallel=pp {EIGHT}",
        "1F1B": f"{STAGES} parallel=pp {EIGHT} parallel.schedule=1f1b",
        "interleaved": f"{STAGES} parallel=pp {EIGHT} parallel.schedule=interleaved "
        "parallel.stages=4 parallel.interleave=2",
        "GEMS mast": f"{STAGES} parallel=gems data.batch_size=2",
        "GEMS master": f"{STAGES} parallel=gems parallel.gems.variant=master {EIGHT}",
        "GEMS basic": f"{STAGES} parallel=gems parallel.gems.variant=basic data.batch_size=2",
        "GEMS basic, more": f"{STAGES} parallel=gems parallel.gems.variant=basic {EIGHT}",
    },
    **{
        name: {
            "space": f"{layers} data.batch_size=4 parallel=sp",
            "samples": f"{layers} data.batch_size=4 parallel=dp parallel.sync_batchnorm=true",
            "channels": f"{layers} data.batch_size=4 parallel=none parallel.tensor=2",
            "one process": f"{layers} data.batch_size=4 parallel=none",
        }
        for name, layers in (("dense", DENSE), ("late", LATE))
    },
}
"""Keys of listed layouts: for the planner, of stages, and of the last layers of networks."""


def last_stage(num_classes: int) -> nn.Module:
    """Last of the four stages of a ResNet-50, and its head."""
    layers: nn.Module = models.resnet50(num_classes=num_classes)[7:]
    return layers


def dense_layers(num_classes: int) -> nn.Module:
    """Dense layers of a VGG-16."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, num_classes)),
    )


class Side(NamedTuple):
    """A configuration to compare, and its placement on ranks."""

    name: str
    config: DictConfig
    placement: Placement


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    if launched() is not None:
        raise ValueError("the benchmark launches its ranks itself: run it without a launcher")
    sides = sides_of(options)
    cluster = cluster_named(cluster_file(options.predict)) if options.predict else None
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)  # a folder shared by all nodes
    with tempfile.TemporaryDirectory(prefix=".layouts-", dir=out) as folder:
        measures = {
            side.name: lambda side=side: _run(side, options, Path(folder)) for side in sides
        }
        runs = alternate(measures, options.turns or min(2, len(sides)))
    result = {
        **origin("layouts", arguments, _device(runs)),
        "options": vars(options),
        "sides": summarise(runs, options.steps),
    }
    for side in sides if cluster else ():
        result["sides"][side.name]["predicted"] = _predicted(side.config, cluster)
    panels = _panels(result["sides"])
    publish(result, table(result), panels, out / f"layouts{'-' * bool(options.set)}{options.set}")


def _device(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    most = max(runs.values(), key=lambda found: int(found[0]["ranks"]))
    return str(most[0]["device"])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("layouts", __doc__)
    add = parser.add_argument
    add("keys", nargs="*", metavar="key=value", help="of spatialdl.train, such as model=resnet50")
    add("--set", choices=list(SETS), default="", help="listed layouts; keys change all of them")
    add("--only", nargs="+", help="names of a set (all)")
    text = f"also the planner's costs on a file of conf/cluster ({MEASURED})"
    add("--predict", nargs="?", const=MEASURED, help=text)
    add("--turns", type=int, help="runs per configuration (1, or 2 to compare several)")
    add_numbers(
        parser,
        warmup=(3, 1, "warm-up steps"),
        rounds=(5, 2, "timed rounds of --steps steps"),
        steps=(3, 1, "steps per round"),
    )
    options = parser.parse_intermixed_args(arguments)
    unknown = set(options.only or ()) - set(SETS.get(options.set, ()))
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} not in --set {options.set}")
    return options


def sides_of(options: argparse.Namespace) -> list[Side]:
    """Compose the configurations.

    Args:
        options: with ``keys``, overrides of which comma-separated values give one configuration
            each, and ``set`` and ``only``.

    Raises:
        ValueError: unknown key, or invalid configuration.
    """
    keys = [rewritten(key) for key in options.keys]
    check_overrides(keys, multirun=True)
    choices = [list(_values(one)) for one in OverridesParser.create().parse_overrides(keys)]
    if options.set:
        listed = SETS[options.set]
        given = [value for values in choices for value in values]
        if len(given) > len(choices):
            raise ValueError(f"keys have one value beside --set {options.set}")
        names = options.only or list(listed)
        return [_side(name, [*listed[name].split(), *given]) for name in names]
    varied = [number for number, values in enumerate(choices) if len(values) > 1]
    sides = []
    for values in itertools.product(*choices):
        name = " ".join(values[number].lstrip("+") for number in varied)
        sides.append(_side(name or "configuration", list(values)))
    return sides


def _values(one: Override) -> Iterator[str]:
    """The override with each of its distinct values."""
    if not one.is_sweep_override():
        yield str(one.input_line)
        return
    if one.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise ValueError(f"{one.input_line}: list the choices, separated by commas")
    key = str(one.input_line).partition("=")[0]
    yield from dict.fromkeys(f"{key}={value}" for value in one.sweep_string_iterator())


def _side(name: str, keys: list[str]) -> Side:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", keys)
    for group, only in (("debug", "none"), ("launcher", "local")):
        if config[group].name != only:
            given = f"{group}={config[group].name}"
            raise ValueError(f"{given} is not supported by the benchmark: remove it")
    if config.parallel.name == "auto":
        config, _ = choose_alone(config, keys)
    placement = check_config(config)
    fit_model_keys(config, keys)
    return Side(name, config, placement)


def _run(side: Side, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the ranks of a configuration, and return their measurements.

    Raises:
        RuntimeError: a rank failed; its output has the reason.
    """
    given, found = folder / "config.yaml", folder / "found.json"
    OmegaConf.save(side.config, given)
    found.unlink(missing_ok=True)
    counts = {name: getattr(options, name) for name in ("warmup", "rounds", "steps")}
    arguments = [str(given), str(found), json.dumps(counts)]
    size = side.placement.world_size
    if size > 1:
        code = start_ranks(size, WORKER, arguments)
    else:
        command = [sys.executable, "-m", WORKER, *arguments]
        code = subprocess.run(command, check=False).returncode
    if code or not found.exists():
        raise RuntimeError(f"{side.name} failed (exit code {code}): see above")
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def _predicted(config: DictConfig, cluster: Cluster | None) -> dict[str, float]:
    """Seconds of a step and MB of the largest rank."""
    assert cluster is not None
    placement = placement_of(config.parallel)
    schedule = schedule_of(config.parallel, placement)
    job = job_of(config, cluster)
    found = predict(job, cluster, placement, schedule, config.parallel.recompute)
    return {"seconds": found.seconds, "memory_mb": max(found.memory) / 2**20}


def summarise(runs: Mapping[str, Sequence[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Mean and spread of the rounds of all turns, and ratios to the first configuration."""
    sides: dict[str, Any] = {}
    totals: dict[str, list[float]] = {}
    for name, found in runs.items():
        images, ranks = found[0]["images"], found[0]["ranks"]
        rounds = [seconds / steps for run in found for seconds in run["rounds"]]
        totals[name] = [images / seconds for seconds in rounds]
        sides[name] = {
            **{"ranks": ranks, "images": images, "rounds": totals[name]},
            "total": statistics.fmean(totals[name]),
            "spread": SPREAD * statistics.stdev(totals[name]),
            "ratio": median_ratio(totals[name], next(iter(totals.values()))),
            "fastest_s": min(rounds),
            "memory_mb": max(run["memory_mb"] for run in found),
        }
        ideal = [pair for run in found for pair in run["ideal"]]
        if ideal:
            sides[name]["ideal"] = images / statistics.median(pair[0] for pair in ideal)
            sides[name]["reached"] = statistics.median(best / took for best, took in ideal)
            sides[name]["held"] = found[0]["held"]
    return sides


def table(result: dict[str, Any]) -> list[str]:
    """Tables of images per second, of ideals, and of predictions."""
    sides, steps = result["sides"], result["options"]["steps"]
    rows = [
        [
            *(name, str(one["ranks"])),
            f"{one['total'] / one['ranks']:.2f} +- {one['spread'] / one['ranks']:.2f}",
            f"{one['total']:.2f} +- {one['spread']:.2f}",
            *(f"{one['ratio']:.2f}", f"{one['memory_mb']:.0f}"),
        ]
        for name, one in sides.items()
    ]
    titles = ["", "ranks", "img/sec per rank", "total img/sec", "times the first", "MB per rank"]
    count = len(next(iter(sides.values()))["rounds"])
    about = f"+-: {SPREAD} standard deviations of {count} rounds of {steps} steps"
    lines = [*markdown(titles, rows), "", f"{about}; MB per rank: peak of the largest"]
    staged = {name: one for name, one in sides.items() if "ideal" in one}
    if staged:
        rows = [
            [name, f"{one['ideal']:.2f}", f"{one['reached']:.2f}", str(one["held"])]
            for name, one in staged.items()
        ]
        lines += ["", *markdown(["", "ideal img/sec", "reached", "held"], rows), ""]
        lines += ["ideal: simulated from the measured times of actions; reached: ideal time / time"]
        lines += ["held: largest number of micro-batches whose activations a rank holds"]
    if all("predicted" in one for one in sides.values()):
        lines += ["", *_table_of_predictions(sides)]
    return lines


def _table_of_predictions(sides: dict[str, Any]) -> list[str]:
    rows, close = [], dict.fromkeys(WITHIN, 0)
    for name, one in sides.items():
        cells, said = [name], one["predicted"]
        for kind, key, measured in (("memory", "memory_mb", "memory_mb"), ("time", "seconds", "")):
            real = one[measured or "fastest_s"]
            off = said[key] / real - 1
            close[kind] += abs(off) <= WITHIN[kind]
            form = ".0f" if measured else ".3g"
            cells += [f"{said[key]:{form}}", f"{real:{form}}", f"{off:+.0%}"]
        rows.append(cells)
    titles = ["", "MB, predicted", "measured", "off", "s per step, predicted", "fastest", "off"]
    best = min(sides, key=lambda name: sides[name]["predicted"]["seconds"])
    counts = (f"{k} within {WITHIN[k]:.0%}: {n} of {len(rows)}" for k, n in close.items())
    return [*markdown(titles, rows), "", "; ".join(counts), f"the planner's fastest: {best}"]


def _panels(sides: dict[str, Any]) -> list[Bars]:
    texts = {
        name: f"{one['total']:.3g}, {one['ratio']:.2f} times the first"
        + (f", {one['reached']:.0%} of ideal" if "ideal" in one else "")
        for name, one in sides.items()
    }
    panels = [
        Bars("images per second, all rounds", {k: one["rounds"] for k, one in sides.items()}, texts)
    ]
    for key, title in (("memory_mb", "peak memory of a rank, MB"), ("fastest_s", "s per step")):
        values, words = {}, {}
        for name, one in sides.items():
            values[name] = [one[key]]
            said = one.get("predicted", {}).get("seconds" if key == "fastest_s" else key)
            words[name] = short(one[key]) + (f" ({short(said)} predicted)" if said else "")
        panels.append(Bars(title, values, words))
    return [panel._replace(ours=list(sides)[1:]) for panel in panels]


if __name__ == "__main__":
    start(main)
