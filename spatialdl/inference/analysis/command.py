"""The command `spatialdl-analyze METHOD FEATURES... --out DIR`.

It runs in a single process, under mpiexec or srun, or launches ranks itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spatialdl.cli.start import run_as_rank
from spatialdl.comm.abort import describe_error
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.launch import launched, start_ranks
from spatialdl.comm.liveness import print_last
from spatialdl.comm.world import start_world
from spatialdl.common.text import counted, print_lines
from spatialdl.inference.analysis import options as given
from spatialdl.inference.predicting.agreed_errors import agreeing, parse_once

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_OK, _FAILED, _INTERRUPTED = 0, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Fit a model to features of tiles, or apply a saved model.

    Args:
        argv: arguments of the command; those of the process if None.

    Returns:
        The exit code: 0; 1 on an error; 2 for invalid arguments; 130 after an interrupt.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if launched() is not None:
            run_as_rank(lambda: sys.exit(_run(start_world(), words)))
            return _OK
        options = given.parser().parse_args(words)
        if options.ranks is not None:
            given.check(options)
            check_capacity(options.ranks)
            return start_ranks(options.ranks, "spatialdl.inference.analysis.command", words)
        return _run(start_world(), words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return _FAILED


def _run(world: Communicator, words: Sequence[str]) -> int:
    """Run the command on every rank; errors are raised on all ranks and printed by rank 0."""
    parsed = parse_once(world, lambda: given.parser().parse_args(words))
    if isinstance(parsed, int):
        return parsed
    code = _OK
    try:
        _analyze(parsed, world)
    except (ValueError, OSError) as error:
        if world.size == 1:
            raise
        if world.rank == 0:
            print_last(f"error: {describe_error(error)}")
        code = _FAILED
    world.barrier()  # a rank that exits with an error would abort the job before rank 0 prints
    return code


def _analyze(options: argparse.Namespace, world: Communicator) -> None:
    from spatialdl.common.files import save_json
    from spatialdl.inference.analysis import methods
    from spatialdl.inference.analysis.cohort import Cohort
    from spatialdl.inference.analysis.regressing import regress

    began = time.monotonic()
    with agreeing(world):
        if world.rank == 0:
            given.check(options)
        options.device = _device(options.device)
    cohort = Cohort(options.features, world)
    with agreeing(world):
        options.out.mkdir(parents=True, exist_ok=True)
    run = {
        given.KMEANS: methods.cluster,
        given.PCA: methods.project,
        given.TSVD: methods.project,
        given.RIDGE: regress,
        given.NEIGHBOURS: methods.search,
    }[options.method]
    found = run(options, cohort)
    summary = {
        "method": options.method,
        "slides": len(cohort.files),
        "tiles": cohort.tiles,
        "width": cohort.width,
        "ranks": world.size,
        "seconds": round(time.monotonic() - began, 3),
        **found,
    }
    if world.rank == 0:
        nan = [key for key, v in summary.items() if isinstance(v, float) and math.isnan(v)]
        save_json(options.out / "summary.json", summary | dict.fromkeys(nan))  # JSON has no NaN
        print_lines(_report(options, summary, found))


def _report(options: argparse.Namespace, summary: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        f"{options.method}: {counted(summary['tiles'], 'tile')} of "
        f"{counted(summary['slides'], 'slide')}, {summary['width']} features each, on "
        f"{counted(summary['ranks'], 'rank')} in {summary['seconds']:.1f} s"
    ]
    for key, value in found.items():
        if key == "slides_not_shown":
            lines += [f"not shown: {text}" for text in value.values()]
            continue
        texts = [_short(one) for one in (value if isinstance(value, list) else [value])]
        more = " ..." if len(texts) > 12 else ""
        lines.append(f"{key.replace('_', ' ')}: {', '.join(texts[:12])}{more}")
    return "\n".join([*lines, f"written: {options.out}"])


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _device(name: str) -> str:
    """Choose the device of this rank: ranks of a machine use its accelerators in turn.

    Raises:
        ValueError: the device does not exist or cannot compute in float64.
    """
    if name == "cpu":
        return name
    import torch

    info = launched()
    try:
        device = torch.device(name)
        if device.index is None and torch.accelerator.is_available():
            number = 0 if info is None else info.local_rank
            device = torch.device(device.type, number % torch.accelerator.device_count())
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot compute in float64 here: {reason}") from error
    return str(device)


if __name__ == "__main__":
    sys.exit(main())
