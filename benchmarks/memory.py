"""Largest square image that trains within a memory limit per rank, on 1, 2, 4 ranks.

Each size is a run of a training step after one of warm-up, which is aborted above the limit. The
peak at one fixed size is also reported, including that of PyTorch without the memory settings of
`spatialdl.comm.allocator`. With ``--tiles``: memory and time over the number of tiles of a slide,
of an encoder (a ResNet-18 with frozen BatchNorm) and gated attention, with the whole graph and in
slices. Memory is the peak resident set minus that of the imports, or on an accelerator the peak
memory of tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import spatialdl
from benchmarks.harness import (
    Bars,
    Lines,
    add_device,
    add_numbers,
    describe,
    markdown,
    origin,
    parser_of,
    publish,
    rank_command,
    rank_environment,
    run_ranks,
    start,
)
from benchmarks.spatial import OVER_LIMIT, training
from spatialdl import models
from spatialdl.comm.device_path import device_of
from spatialdl.layout.layout import nearly_cubic
from spatialdl.torch_internals import import_compiler
from spatialdl.training.bags import MODES, EndToEndNetwork
from spatialdl.training.peak_memory import peak_memory_mb

STEP = 64
"""Sides are multiples of this."""
KILLED = (137, -9)
STEPS = 2
Measure = Callable[[int], float | None]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    result = {**origin("memory", arguments), "options": vars(options)}
    if options.tiles:
        _measure_bags(options, result)
    else:
        _measure_images(options, result)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("memory", __doc__)
    text = "function of spatialdl.models (%(default)s)"
    parser.add_argument("--model", default="resnet18", help=text)
    parser.add_argument("--limit", type=float, default=1500, help="MB per rank (%(default)s)")
    add_numbers(
        parser,
        ranks=([1, 2, 4], 1, "ranks"),
        batch=(1, 1, "images per step"),
        size=(2048, 1, "fixed size"),
        largest=(16384, STEP, "largest size"),
        threads=(2, 1, "total threads"),
        tiles=([], 1, "numbers of tiles of a slide to train on, instead of images"),
        side=(64, 1, "side of these tiles"),
        slice=(16, 1, "tiles per slice"),
        width=(256, 1, "features per tile"),
    )
    add_device(parser)
    options = parser.parse_args(arguments)
    if options.limit <= 0:
        parser.error(f"--limit {options.limit} must be more than 0")
    options.steps = 1
    return options


def _name(ranks: int, again: bool = False) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}{', recompute' * again}"


# --- images


def _measure_images(options: argparse.Namespace, result: dict[str, Any]) -> None:
    result["device"] = describe(device_of(options.device))
    sides = [(ranks, again) for again in (False, True) for ranks in options.ranks]
    with tqdm(total=1 + len(sides), desc="sides", unit="side") as bar:
        result["plain_mb_at_size"] = run(options, 1, False, options.size, None, plain=True)
        bar.update()
        result["rows"] = []
        for ranks, again in sides:
            bar.set_postfix_str(_name(ranks, again))
            result["rows"].append(_measure_side(options, ranks, again))
            bar.update()
    path = Path(options.out) / f"memory-{options.model}-{options.limit:.0f}mb"
    publish(result, table(result), _panels(result), path)


def _measure_side(options: argparse.Namespace, ranks: int, again: bool) -> dict[str, Any]:
    runs: dict[int, float | None] = {}

    def measure(side: int) -> float | None:
        runs[side] = run(options, ranks, again, side, options.limit)
        return runs[side]

    largest = search(measure, options.limit, options.largest)
    at_size = runs.get(options.size) or run(options, ranks, again, options.size, None)
    return {
        **{"ranks": ranks, "recompute": again, "largest": largest, "memory_mb_at_size": at_size},
        "runs": {str(side): found for side, found in sorted(runs.items())},
    }


def search(
    measure: Measure, limit: float, most: int, fits: int = 0, too_large: int | None = None
) -> int:
    """Largest multiple of `STEP` up to `most` for which `measure` returns a number; 0 if none.

    Bisection between the largest side that trained and the smallest that did not. As memory grows
    with the area, the side extrapolated from the last run is tried first.

    Args:
        fits, too_large: sides known to train and not to train, multiples of `STEP`.
    """
    if too_large is None:
        too_large = most // STEP * STEP + STEP
    following = (fits + too_large) // 2 // STEP * STEP if fits else 8 * STEP
    while too_large - fits > STEP:
        side = min(max(following, fits + STEP), too_large - STEP)
        memory = measure(side)
        if memory is None:
            too_large = side
            following = fits + (side - fits) * 3 // 4 // STEP * STEP
        else:
            fits = side
            following = min(int(side * sqrt(limit / max(memory, 1.0))), 4 * side) // STEP * STEP
    return fits


def run(
    options: argparse.Namespace,
    ranks: int,
    again: bool,
    side: int,
    limit: float | None,
    plain: bool = False,
) -> float | None:
    """Peak MB of the largest rank; None above the limit or the available memory."""
    given = training(options, recompute=again, limit=limit)
    given.size, given.grid = side, None if ranks == 1 else nearly_cubic(ranks)
    command = rank_command("spatial", given, ranks)
    variables = rank_environment(max(1, options.threads // ranks), plain)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if "over limit" in done.stdout or done.returncode in (OVER_LIMIT, *KILLED):
        return None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found = float(json.loads(done.stdout.strip().splitlines()[-1])["memory_mb"])
    return found if limit is None or found <= limit else None


def table(result: dict[str, Any]) -> list[str]:
    """Table with a line per number of ranks, without and with recomputation."""
    options, rows = result["options"], result["rows"]
    first = rows[0]
    one = first["memory_mb_at_size"]
    cells = [["plain PyTorch", "", "", *_peak(result["plain_mb_at_size"], one)]]
    for row in rows:
        pixels = (row["largest"] / first["largest"]) ** 2 if first["largest"] else 0.0
        image = f"{row['largest']}x{row['largest']}"
        title = _name(row["ranks"], row["recompute"])
        cells.append([title, image, f"{pixels:.2f}", *_peak(row["memory_mb_at_size"], one)])
    peak = f"peak at {options['size']}, MB per rank"
    about = f"{options['model']}, batch {options['batch']}, {options['limit']:.0f} MB per rank"
    titles = ["", "largest image", "times the pixels", peak, "of one process"]
    return [about, "", *markdown(titles, cells)]


def _peak(memory: float | None, one: float | None) -> tuple[str, str]:
    """MB, and the ratio to one process."""
    found = "killed" if memory is None else f"{memory:.0f}"
    return found, f"{memory / one:.2f}" if memory and one else ""


def _panels(result: dict[str, Any]) -> list[Bars]:
    options = result["options"]
    titles = {
        "largest": f"side of the largest image within {options['limit']:.0f} MB per rank",
        "memory_mb_at_size": f"peak of a rank at {options['size']}x{options['size']}, MB",
    }
    names = {_name(row["ranks"], row["recompute"]): row for row in result["rows"]}
    blue = [name for name, row in names.items() if not row["recompute"]]
    return [
        Bars(title, {name: [row[key] or 0] for name, row in names.items()}, ours=blue)
        for key, title in titles.items()
    ]


# --- tiles of a slide


def _measure_bags(options: argparse.Namespace, result: dict[str, Any]) -> None:
    result["rows"] = []
    for tiles, ranks, mode in tqdm(list(product(options.tiles, options.ranks, MODES)), unit="run"):
        given = argparse.Namespace(
            **{**vars(options), "mode": mode, "count": tiles, "grid": [ranks]}
        )
        found = run_ranks("memory", given, ranks)
        result["rows"].append({"tiles": tiles, "ranks": ranks, "mode": mode, **found})
    curves = {
        f"{mode}, {_name(ranks)}": [
            (row["tiles"], row["memory_mb"])
            for row in result["rows"]
            if (row["mode"], row["ranks"]) == (mode, ranks)
        ]
        for mode, ranks in product(MODES[::-1], options.ranks)
    }
    panel = Lines("memory of a training step", "tiles of the slide", "MB per rank", curves)
    publish(result, table_of_bags(result), [panel], Path(options.out) / "memory-bags")


def table_of_bags(result: dict[str, Any]) -> list[str]:
    """Table with a line per number of tiles, and a column per mode and number of ranks."""
    options = result["options"]
    sides = list(product(MODES[::-1], options["ranks"]))
    found = {(row["tiles"], row["mode"], row["ranks"]): row for row in result["rows"]}
    rows = []
    for tiles in options["tiles"]:
        these = (found[tiles, mode, ranks] for mode, ranks in sides)
        rows.append(
            [str(tiles), *(f"{x['memory_mb']:.0f} MB, {x['seconds']:.1f} s" for x in these)]
        )
    about = (
        f"tiles of {options['side']}x{options['side']}, slices of {options['slice']}; peak MB of "
        "a rank, and seconds of a step"
    )
    titles = ["tiles", *(f"{mode}, {_name(ranks)}" for mode, ranks in sides)]
    return [about, "", *markdown(titles, rows)]


def noise(begin: int, end: int, side: int) -> Tensor:
    """Noise tiles (end - begin, 3, side, side); each depends on its index only."""
    tiles = [
        torch.rand(3, side, side, generator=torch.Generator().manual_seed(number))
        for number in range(begin, end)
    ]
    return torch.stack(tiles) if tiles else torch.empty(0, 3, side, side)


def work(options: argparse.Namespace) -> dict[str, float] | None:
    """Train on one slide: peak memory of the largest rank, and seconds of the last step."""
    import_compiler()  # optimizers import it; counts as imports, not training
    device = torch.device("cpu")
    mesh = spatialdl.init_mesh(tuple(options.grid), check=False)
    baseline = peak_memory_mb(device)
    torch.manual_seed(0)
    network = EndToEndNetwork(
        models.resnet18(num_classes=options.width),
        models.abmil(in_channels=options.width, width=32, hidden=32, dropout=0.0),
        (3, options.side, options.side),
        slice_size=options.slice,
        mode=options.mode,
        frozen_norm=True,
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    begin, end = mesh.box((options.count,))
    tiles = noise(begin, end, options.side)
    bag = spatialdl.from_local(tiles.flatten(1).t()[None], mesh, (options.count,))
    seconds = 0.0
    for _ in range(STEPS):
        mesh.comm.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(network(bag), torch.tensor([1])))
        spatialdl.average_gradients(network, mesh)
        optimizer.step()
        seconds = time.perf_counter() - began
    ranks = mesh.comm.gather((peak_memory_mb(device) - baseline, seconds))
    if ranks is None:
        return None
    memory, times = zip(*ranks, strict=True)
    return {"memory_mb": max(memory), "seconds": max(times)}


if __name__ == "__main__":
    start(main)
