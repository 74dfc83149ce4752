"""``python -m spatialdl.check my_package.build_model num_classes=3 --size 96x80 --grid 2x2``

Runs one training step of a network on a split image and in one process, compares all results, and
prints the exact and the rejected operations with their positions. Started as one process, it
launches the ranks itself. Exit code 0 if all results are exact, else 1.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from spatialdl.comm.abort import describe_error, install_abort_hook
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.launch import end_with_launcher, launched, start_ranks
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.layout import by
from spatialdl.pipeline.layout_checks import check_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spatialdl.comm.mesh import Mesh
    from spatialdl.spatial.checking.compare import Difference, Numbers
    from spatialdl.spatial.checking.record import Recorder

SEED = 0
EXACT = "exact"
MOST_DIFFERENCES = 10


def main() -> None:
    """Check the network on as many ranks as the grid has parts."""
    options = _options(sys.argv[1:])
    if launched() is not None:
        install_abort_hook()
        end_with_launcher()
        exact = _check(options)
        sys.exit(0 if exact or options.answer else 1)
    try:
        _check_user_input(options)
        exact = _check(options) if prod(options.grid) == 1 else _start(options)
    except (ValueError, UnsupportedSpatialOp, OSError) as error:
        sys.exit(f"error: {describe_error(error)}")
    sys.exit(0 if exact else 1)


def _start(options: argparse.Namespace) -> bool:
    """Run this command on several ranks.

    The result is returned in a file: launchers report ranks that exit with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        ranks = prod(options.grid)
        check_capacity(ranks)
        code = start_ranks(ranks, "spatialdl.check", [*sys.argv[1:], "--answer", str(answer)])
        return code == 0 and answer.read_text() == EXACT


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m spatialdl.check",
        description="Compare a network on a split image with a single process.",
    )
    parser.add_argument(
        "network", help="package.module.function or file.py:function that builds the network"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="of that function: num_classes=3"
    )
    parser.add_argument(
        "--size", type=_sides, required=True, help="image size: 96x80, 500, 32x32x32"
    )
    parser.add_argument("--grid", type=_sides, required=True, help="grid of ranks: 2x2, 4, 2x1x1")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--batch", type=int, default=2, help="number of images (default 2)")
    parser.add_argument(
        "--channels", type=int, help="image channels (default: in_channels=N of the function, or 3)"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="train", action="store_true", default=True)
    mode.add_argument("--eval", dest="train", action="store_false", help="default: --train")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    if options.channels is None:
        options.channels = _channels_of(options.arguments)
    if options.batch < 1 or options.channels < 1:
        parser.error("--batch and --channels must be at least 1")
    return options


def _channels_of(words: Sequence[str]) -> int:
    matches = (re.fullmatch(r"in_chan(?:nel)?s=(\d+)", word) for word in words)
    return next((int(match[1]) for match in matches if match), 3)


def _sides(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text} must be one to three positive numbers, such as 500, 96x80 or 32x32x32"
        )
    return tuple(map(int, text.split("x")))


def _check_user_input(options: argparse.Namespace) -> None:
    """Check for user errors before ranks start, so that each is printed once."""
    from spatialdl.spatial.checking.compare import differences
    from spatialdl.spatial.checking.network import arguments_of, build

    size, grid = options.size, options.grid
    if len(size) != len(grid):
        raise ValueError(
            f"an image of {by(size)} has {len(size)} dims, but the grid {by(grid)} has "
            f"{len(grid)}: --grid and --size must have the same number of dims"
        )
    check_size(size, grid)
    network = build(options.network, SEED, arguments_of(options.arguments))
    first, second = (_plain_step(options, network, seed) for seed in (SEED, SEED + 1))
    changed = differences(second, first)
    if changed:
        raise ValueError(
            f"results of a single process vary between runs ({changed[0]}), so there is no "
            "reference: disable randomness in the network, or use --eval"
        )


def _plain_step(options: argparse.Namespace, network: nn.Module, seed: int) -> Numbers:
    """Results of a single process; changes only dtype, mode and dropout of `network`.

    Raises:
        ValueError: if a step fails.
    """
    import torch

    from spatialdl.spatial.checking.compare import one_step
    from spatialdl.spatial.checking.network import switch_off_dropout
    from spatialdl.spatial.source_lines import users_line_of

    network.to(getattr(torch, options.dtype)).train(options.train)
    switch_off_dropout(network)
    torch.manual_seed(seed)
    image = _image(options)
    try:
        return one_step(copy.deepcopy(network), image)
    except Exception as error:
        raise ValueError(
            f"a single process failed on images {tuple(image.shape)} (--batch, --channels, "
            f"--size): {type(error).__name__} at {users_line_of(error)}: {error}"
        ) from error


def _image(options: argparse.Namespace) -> Tensor:
    import torch

    draw = torch.Generator().manual_seed(SEED)
    shape = (options.batch, options.channels, *options.size)
    return torch.randn(shape, generator=draw, dtype=getattr(torch, options.dtype))


def _check(options: argparse.Namespace) -> bool:
    """Run both steps and compare them, on every rank; rank 0 prints the report."""
    from spatialdl.comm import check
    from spatialdl.comm.mesh import init_mesh
    from spatialdl.spatial.checking.compare import differences, one_step
    from spatialdl.spatial.checking.network import arguments_of, build
    from spatialdl.spatial.checking.record import Recorder

    mesh = init_mesh(options.grid)
    check.enable()
    network = build(options.network, SEED, arguments_of(options.arguments))
    plain = _plain_step(options, network, SEED)
    spare = copy.deepcopy(network)
    recorder = Recorder(network)
    refusal, found = "", []
    try:
        with recorder:
            ours = one_step(network, _image(options), mesh=mesh)
        found = differences(ours, plain)
    except UnsupportedSpatialOp as error:
        refusal = str(error)
    everywhere = list(dict.fromkeys(one for rank in mesh.comm.allgather(found) for one in rank))
    exact = not (refusal or everywhere or recorder.refused)
    workaround = _workaround(options, spare, mesh, plain, recorder) if recorder.refused else ""
    if mesh.comm.rank == 0:
        lines = _report(options, mesh, plain, recorder, refusal, everywhere)
        if workaround:
            lines.insert(len(lines) - 1, workaround)
        print("\n".join(lines), flush=True)
        if options.answer:
            options.answer.write_text(EXACT if exact else "not exact")
    return exact


def _workaround(
    options: argparse.Namespace, network: nn.Module, mesh: Mesh, plain: Numbers, recorder: Recorder
) -> str:
    """The module before which gathering makes the network exact, verified by a step; collective.

    Args:
        network: as before the first step; not modified.
    """
    from spatialdl.spatial.checking.compare import differences, one_step
    from spatialdl.spatial.split import gather_before

    for name in dict.fromkeys(name for one in recorder.refusals for name in one.around):
        candidate = copy.deepcopy(network)
        gather_before(candidate, name)
        try:
            found = differences(one_step(candidate, _image(options), mesh=mesh), plain)
        except UnsupportedSpatialOp:
            continue
        if not any(mesh.comm.allgather(bool(found))):
            return (
                f'workaround: spatialdl.gather_before(model, "{name}"), or '
                f"parallel.gather_before={name}, gathers the image there: tested, all results "
                "equal a single process"
            )
    return ""


def _report(
    options: argparse.Namespace,
    mesh: Mesh,
    plain: Numbers,
    recorder: Recorder,
    refusal: str,
    found: list[Difference],
) -> list[str]:
    shape = by((options.batch, options.channels, *options.size))
    lines = [
        f"{options.network}: images {shape}, "
        f"{options.dtype}, {'training' if options.train else 'evaluation'}, on "
        f"{by(mesh.grid)} ranks",
        "",
        *recorder.table(exact=not (found or refusal)),
        "",
    ]
    for operation in recorder.refused:
        lines += [f"refused: {operation.place()}", f"    {operation.reason}"]
    if refusal and not any(operation.reason == refusal for operation in recorder.refused):
        lines += ["refused in backward:", f"    {refusal}"]
    numbers = f"outputs, loss, {len(plain.gradients)} gradients and {len(plain.buffers)} buffers"
    if refusal:
        lines.append("not compared: the rejected operation aborted the step")
    elif found:
        lines.append(f"NOT EQUAL to a single process: {len(found)} of {numbers}")
        lines += [f"    {difference}" for difference in found[:MOST_DIFFERENCES]]
    else:
        gathered = ", with rejected operations on the gathered image" if recorder.refused else ""
        lines.append(f"equal to a single process: {numbers}{gathered}")
    exact = not (found or refusal or recorder.refused)
    return [*lines, "exact" if exact else "not exact"]


if __name__ == "__main__":
    main()
