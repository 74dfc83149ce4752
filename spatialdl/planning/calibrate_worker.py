"""One rank that measures how fast this machine computes and talks; rank 0 prints a line of JSON.

Started alone or by a launcher; with others, all compute the same at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.held import Held
from spatialdl.comm.plan import Plan
from spatialdl.comm.world import start_world
from spatialdl.layout import Box
from spatialdl.planning.ledger import Ledger, Work

aten = torch.ops.aten
Measured = tuple[Work, float]

LEAST_S = 0.06
"""Each operation is repeated for so long, at least three times."""

CONVOLUTIONS = (  # channels in and out, kernel, stride, side
    (3, 64, 7, 2, 256),
    (3, 64, 7, 2, 512),
    (3, 16, 3, 1, 256),
    (16, 16, 3, 1, 64),
    (16, 16, 3, 1, 256),
    (64, 64, 3, 1, 32),
    (64, 64, 3, 1, 128),
    (64, 64, 3, 1, 256),
    (128, 128, 3, 1, 64),
    (64, 128, 3, 2, 128),
    (256, 256, 3, 1, 16),
    (256, 512, 3, 2, 32),
    (512, 512, 3, 1, 16),
    (512, 512, 3, 1, 8),
    (16, 64, 1, 1, 256),
    (64, 256, 1, 1, 64),
    (256, 64, 1, 1, 128),
    (1024, 256, 1, 1, 16),
    (64, 128, 1, 2, 64),
    (256, 512, 1, 2, 128),
)
SIDES = (16, 48, 128, 256, 512)
"""Of images of 64 channels, on which all else is measured: 64 KB to 64 MB."""


def main() -> None:
    install_abort_hook()
    parser = argparse.ArgumentParser()
    parser.add_argument("--talk", action="store_true", help="measure messages, on two ranks")
    options = parser.parse_args()
    world = start_world()
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    if options.talk:
        found |= {"exchange": _exchanges(world), "all_reduce": _reductions(world)}
    else:
        todo = [*_convolutions(), *_others()]
        shown = tqdm(todo, desc="operations", disable=world.rank != 0, leave=False)
        found["operations"] = [
            [*work, seconds] for make in shown for work, seconds in _measure(make, world)
        ]
    everybody = world.gather(found)
    if everybody is not None:
        print(json.dumps(everybody[0]))


Operation = tuple[str | None, Callable[[], Any]]


def _measure(make: Callable[[], list[Operation]], world: Communicator) -> Iterator[Measured]:
    with torch.no_grad():
        for kind, operation in make():
            ledger = Ledger()
            with ledger.watch():
                operation()
            works = [work for done in ledger.work.values() for work in done]
            work = works[0] if kind is None else works[0]._replace(kind=kind)
            yield work, _seconds(operation, world)


def _seconds(operation: Callable[[], Any], world: Communicator) -> float:
    """Of the fastest run, while other ranks do the same: programs beside it only slow it down."""
    world.barrier()
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - began < LEAST_S and len(found) < 1000):
        started = time.perf_counter()
        operation()
        found.append(time.perf_counter() - started)
    return min(found)


def _convolutions() -> list[Callable[[], list[Operation]]]:
    def make(ci: int, co: int, kernel: int, stride: int, side: int) -> list[Operation]:
        x, weight = torch.randn(1, ci, side, side), torch.randn(co, ci, kernel, kernel)
        around = kernel // 2
        y = torch.conv2d(x, weight, None, stride, around)
        grad = torch.randn_like(y)

        def backward(mask: list[bool]) -> Any:
            sizes = [stride] * 2, [around] * 2, [1, 1]
            return aten.convolution_backward(grad, x, weight, None, *sizes, False, [0, 0], 1, mask)

        return [
            (None, lambda: torch.conv2d(x, weight, None, stride, around)),
            *([(None, lambda: backward([True, False, False]))] if ci > 3 else []),
            (None, lambda: backward([False, True, False])),
        ]

    return [lambda shape=shape: make(*shape) for shape in CONVOLUTIONS]  # type: ignore[misc]


def _others() -> list[Callable[[], list[Operation]]]:
    return [lambda side=side: _at(side) for side in SIDES]  # type: ignore[misc]


def _at(side: int) -> list[Operation]:
    x, grad = torch.randn(1, 64, side, side), torch.randn(1, 64, side, side)
    ones, zeros = torch.ones(64), torch.zeros(64)
    pooled, where = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    left = torch.randn(side * 4, side * 4)

    def norm(training: bool) -> Any:
        return aten.native_batch_norm(x, ones, zeros, zeros, ones, training, 0.0, 1e-5)

    def norm_backward(mask: list[bool], training: bool) -> Any:
        return aten.native_batch_norm_backward(
            grad, x, ones, zeros, ones, zeros, ones, training, 1e-5, mask
        )

    return [
        (None, lambda: aten.threshold_backward(grad, x, 0)),
        (None, lambda: x + grad),
        (None, lambda: torch.relu(x)),
        (None, lambda: x.add_(grad, alpha=1e-9)),
        (None, lambda: norm(True)),
        (None, lambda: norm(False)),
        ("statistics", lambda: torch.batch_norm_update_stats(x, None, None, 0.0)),
        (None, lambda: norm_backward([True, True, True], True)),
        (None, lambda: norm_backward([False, True, True], False)),
        (None, lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])),
        (
            None,
            lambda: aten.max_pool2d_with_indices_backward(
                pooled, x, [3, 3], [2, 2], [1, 1], [1, 1], False, where
            ),
        ),
        (None, lambda: left @ left),
    ]


def _exchanges(world: Communicator) -> list[list[float]]:
    """Bytes that each of two ranks sends the other, and seconds."""
    found = []
    for cols in (64, 2**12, 2**15, 2**18, 2**21):
        tile, out = torch.zeros(1, 1, 2, cols), torch.zeros(1, 1, 2, cols)
        owned = [Box(0, 1, 2 * rank, 2 * rank + 2, 0, cols) for rank in range(2)]
        plan = Plan(owned, owned[::-1], world.rank)
        held = [Held(tile, plan.own)], [Held(out, plan.need)]

        def talk(plan: Plan = plan, held: Any = held, device: Any = tile.device) -> None:
            start_exchange(world, plan, *held, device=device).wait()

        talk()
        found.append([float(tile.nbytes), _together(talk, world)])
    return found


def _reductions(world: Communicator) -> list[list[float]]:
    found = []
    for numbers in (16, 2**12, 2**18, 2**22):
        values = torch.zeros(numbers)
        world.all_reduce_(values)
        seconds = _together(lambda values=values: world.all_reduce_(values), world)  # type: ignore[misc]
        found.append([float(values.nbytes), seconds])
    return found


def _together(talk: Callable[[], None], world: Communicator) -> float:
    """Median of a fixed number, so that both ranks talk equally often."""
    found = []
    for _ in range(10):
        world.barrier()
        started = time.perf_counter()
        talk()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


if __name__ == "__main__":
    main()
