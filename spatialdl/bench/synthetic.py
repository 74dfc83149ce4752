"""Images per second of training, for any keys of `spatialdl.train`, without loading data.

Training repeats one batch. Steps are timed in rounds, and reported as in other synthetic
benchmarks: mean of the rounds, and 1.96 standard deviations. Keys with several values, such as
parallel=none,sp, are compared: configurations alternate, each on newly launched ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from spatialdl.bench.results import (
    heading,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    save,
)
from spatialdl.comm.launch import launched, start_ranks
from spatialdl.configuring.overrides import check_overrides
from spatialdl.configuring.own_keys import fit_model_keys, rewritten
from spatialdl.parallel.placement import Placement
from spatialdl.planning.auto import choose_alone
from spatialdl.training.checks import check_config

WORKER = "spatialdl.bench.synthetic_worker"
SPREAD = 1.96
"""Standard deviations of the 95 % interval of a normal distribution."""


class SyntheticVariant(NamedTuple):
    """A configuration to compare.

    Attributes:
        name: keys that differ between configurations.
        config: configuration of `spatialdl.train`.
        placement: its placement on ranks.
    """

    name: str
    config: DictConfig
    placement: Placement


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    if launched() is not None:
        raise ValueError("the benchmark launches its ranks itself: run it without a launcher")
    out = Path(options.out)
    sides = sides_of(options.keys)
    turns = options.turns or min(2, len(sides))
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    out.mkdir(parents=True, exist_ok=True)  # a folder shared by all nodes
    with tempfile.TemporaryDirectory(prefix=".synthetic-", dir=out) as folder:
        for turn in range(turns):
            for side in sides if turn % 2 == 0 else reversed(sides):
                print(f"{side.name}: {side.placement.describe()}", flush=True)
                runs[side.name].append(_run(side, options, Path(folder)))
    result = {**origin("synthetic", list(_without_out(arguments))), **summarise(options, runs)}
    publish(result, table, draw, out / "synthetic")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("synthetic", __doc__)
    add = parser.add_argument
    add("keys", nargs="*", metavar="key=value", help="of spatialdl.train, such as model=resnet50")
    add("--warmup", type=int, default=3, help="warm-up steps (%(default)s)")
    add("--rounds", type=int, default=5, help="timed rounds of --steps steps (%(default)s)")
    add("--steps", type=int, default=3, help="steps per round (%(default)s)")
    add("--turns", type=int, help="runs per configuration (1, or 2 to compare several)")
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("warmup", 1), ("rounds", 2), ("steps", 1), ("turns", 1)):
        given = getattr(options, name)
        if given is not None and given < least:
            raise ValueError(f"--{name} {given} must be at least {least}")
    return options


def _without_out(arguments: Sequence[str]) -> Iterator[str]:
    previous = ""
    for word in arguments:
        if not word.startswith("--out") and previous != "--out":
            yield word
        previous = word


def sides_of(keys: Sequence[str]) -> list[SyntheticVariant]:
    """Compose the configurations of keys of ``spatialdl.train``.

    Args:
        keys: overrides; comma-separated values give one configuration each.

    Raises:
        ValueError: unknown key, or invalid configuration.
    """
    keys = [rewritten(key) for key in keys]
    check_overrides(keys, multirun=True)
    choices = [list(_values(one)) for one in OverridesParser.create().parse_overrides(keys)]
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


def _side(name: str, keys: list[str]) -> SyntheticVariant:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", keys)
    if config.debug.name != "none":
        raise ValueError(f"debug={config.debug.name} is not supported by the benchmark: remove it")
    if config.launcher.name != "local":
        raise ValueError(
            f"launcher={config.launcher.name} is not supported by the benchmark: remove it"
        )
    if config.parallel.name == "auto":
        config, _ = choose_alone(config, keys)
    placement = check_config(config)
    fit_model_keys(config, keys)
    return SyntheticVariant(name, config, placement)


def _run(side: SyntheticVariant, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the ranks of a configuration, and return their measurements.

    Raises:
        RuntimeError: a rank failed; its output has the reason.
    """
    given, found = folder / "config.yaml", folder / "found.json"
    OmegaConf.save(side.config, given)
    found.unlink(missing_ok=True)
    counts = (f"--{name}={getattr(options, name)}" for name in ("warmup", "rounds", "steps"))
    arguments = [str(given), str(found), *counts]
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


def summarise(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean and spread of the rounds of all turns, and ratios to the first configuration."""
    totals = {
        name: [
            run["images"] * options.steps / seconds for run in found for seconds in run["rounds"]
        ]
        for name, found in runs.items()
    }
    first = next(iter(totals.values()))
    sides = {}
    for name, found in runs.items():
        ranks, total = found[0]["ranks"], totals[name]
        mean, spread = statistics.fmean(total), SPREAD * statistics.stdev(total)
        sides[name] = {
            "ranks": ranks,
            "images": found[0]["images"],
            "total": mean,
            "total_spread": spread,
            "per_rank": mean / ranks,
            "per_rank_spread": spread / ranks,
            "ratio": median_ratio(total, first),
            "memory_mb": max(run["memory_mb"] for run in found),
            "rounds": total,
        }
    return {
        "device": max(runs.values(), key=lambda found: int(found[0]["ranks"]))[0]["device"],
        "options": vars(options),
        "sides": sides,
    }


def table(result: dict[str, Any]) -> str:
    """Table of images per second per rank and in total."""
    sides = result["sides"]
    rows = [
        [
            name,
            str(one["ranks"]),
            f"{one['per_rank']:.2f} +- {one['per_rank_spread']:.2f}",
            f"{one['total']:.2f} +- {one['total_spread']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['memory_mb']:.0f}",
        ]
        for name, one in sides.items()
    ]
    titles = ["", "ranks", "img/sec per rank", "total img/sec", "times the first", "MB a rank"]
    rounds = len(next(iter(sides.values()))["rounds"])
    steps = result["options"]["steps"]
    lines = [
        *heading(result),
        *markdown(titles, rows),
        "",
        f"+-: {SPREAD} standard deviations of {rounds} rounds of {steps} steps; "
        "MB a rank: peak of the largest",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars by configuration with their spread, and every round as a point."""
    from matplotlib.figure import Figure

    sides = result["sides"]
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(sides)), dpi=150, layout="constrained")
    panel, ends = figure.subplots(), []
    for row, one in enumerate(sides.values()):
        panel.barh(row, one["total"], height=0.6, color="#1f5fa8", xerr=one["total_spread"])
        panel.plot(one["rounds"], [row] * len(one["rounds"]), "o", color="black", markersize=2.5)
        ends.append(max(*one["rounds"], one["total"] + one["total_spread"]))
        text = f"  {one['per_rank']:.3g} a rank"
        if row > 0:
            text += f", {one['ratio']:.2f} times the first"
        panel.text(ends[-1], row, text, va="center", fontsize=8)
    names = [f"{name}, {one['ranks']} rank(s)" for name, one in sides.items()]
    panel.set_yticks(range(len(sides)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.5 * max(ends))
    panel.set_xlabel(f"total images per second; bars: {SPREAD} standard deviations")
    save(figure, path)
