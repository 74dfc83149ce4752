"""Ranks that measure this machine's computation and communication; rank 0 prints a line of JSON.

Each operation is timed in three ways, one after the other: on all ranks at once, on one of them
while the others sleep, and on it with as many threads as there are ranks. The measurements are
repeated some time later and the fastest counts, as other programs only slow them down, and not all
the time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from spatialdl.comm.abort import install_abort_hook
from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.world import start_world
from spatialdl.layout.layout import Box
from spatialdl.spatial.streaming.ledger import Ledger, RankOperation

aten = torch.ops.aten
ROUNDS = 3
LEAST_S = 0.015
"""Minimum seconds of repetitions of an operation in each way and round; at least two."""

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
"""Of images of 64 channels, for all other operations: 64 KB to 64 MB."""


Operation = tuple[str | None, Callable[[], Any]]
WAYS = ("busy", "lone", "alone")


def main() -> None:
    install_abort_hook()
    world = start_world()
    works, seconds = _operations(world)
    result: dict[str, Any] = {
        way: [[*w, s] for w, s in zip(works, seconds[way], strict=True)] for way in WAYS
    }
    result |= _communication(world)
    if world.rank == 0:
        print(json.dumps(result))


def _operations(world: Communicator) -> tuple[list[RankOperation], dict[str, list[float]]]:
    """All operations, and their seconds in each way."""
    works: list[RankOperation] = []
    rounds: list[dict[str, list[float]]] = []
    todo = [*_convolutions(), *_others()]
    with (
        torch.no_grad(),
        tqdm(total=ROUNDS * len(todo), desc="operations", disable=world.rank != 0) as bar,
    ):
        for number in range(ROUNDS):
            rounds.append({way: [] for way in WAYS})
            for make in todo:
                for kind, operation in make():
                    if number == 0:
                        works.append(_work(kind, operation))
                    for way, seconds in zip(WAYS, _timed(operation, world), strict=True):
                        rounds[-1][way].append(seconds)
                bar.update()
    return works, {
        way: [min(times) for times in zip(*(results[way] for results in rounds), strict=True)]
        for way in WAYS
    }


def _work(kind: str | None, operation: Callable[[], Any]) -> RankOperation:
    ledger = Ledger()
    with ledger.watch():
        operation()
    work = next(recorded for done in ledger.work.values() for recorded in done)
    return work if kind is None else work._replace(kind=kind)


def _timed(operation: Callable[[], Any], world: Communicator) -> tuple[float, float, float]:
    """Seconds in each of the `WAYS`, on rank 0."""
    world.barrier()
    busy, lone, alone = _fastest(operation), 0.0, 0.0
    world.barrier()  # so that slower ranks do not disturb rank 0
    if world.rank == 0:
        lone = _fastest(operation)
        torch.set_num_threads(world.size)
        alone = _fastest(operation)
        torch.set_num_threads(1)
    _wait_asleep(world)
    return busy, lone, alone


def _wait_asleep(world: Any) -> None:
    """A barrier for ranks that must not use a core while they wait."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def _fastest(operation: Callable[[], Any]) -> float:
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 2 or time.perf_counter() - began < LEAST_S:
        started = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _convolutions() -> list[Callable[[], list[Operation]]]:
    def make(ci: int, co: int, kernel: int, stride: int, side: int) -> list[Operation]:
        x, weight = torch.randn(1, ci, side, side), torch.randn(co, ci, kernel, kernel)
        padding = kernel // 2
        y = torch.conv2d(x, weight, None, stride, padding)
        grad = torch.randn_like(y)

        def backward(mask: list[bool]) -> Any:
            sizes = [stride] * 2, [padding] * 2, [1, 1]
            return aten.convolution_backward(grad, x, weight, None, *sizes, False, [0, 0], 1, mask)

        return [
            (None, lambda: torch.conv2d(x, weight, None, stride, padding)),
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


def _communication(world: Communicator) -> dict[str, list[list[float]]]:
    """Measure messages between two of the ranks."""
    if world.rank > 1:
        world.subset([world.rank])
        _wait_asleep(world)
        return {}
    pair = world.subset([0, 1])
    result = {"exchange": _exchanges(pair), "all_reduce": _reductions(pair)}
    _wait_asleep(world)
    return result


def _exchanges(world: Communicator) -> list[list[float]]:
    """Bytes that each of two ranks sends to the other, and seconds."""
    result = []
    for cols in (64, 2**12, 2**15, 2**18, 2**21):
        tile, out = torch.zeros(1, 1, 2, cols), torch.zeros(1, 1, 2, cols)
        owned = [Box(((0, 1), (2 * rank, 2 * rank + 2), (0, cols))) for rank in range(2)]
        plan = Plan(owned, owned[::-1], world.rank)
        both = Exchange(
            plan, [BoxedTensor(tile, plan.own)], [BoxedTensor(out, plan.need)], tile.device
        )

        def exchange_once(exchange: Exchange = both) -> None:
            start_exchange(world, exchange).wait()

        exchange_once()
        result.append([float(tile.nbytes), _together(exchange_once, world)])
    return result


def _reductions(world: Communicator) -> list[list[float]]:
    result = []
    for numbers in (16, 2**12, 2**18, 2**22):
        values = torch.zeros(numbers)
        world.all_reduce_(values)
        seconds = _together(lambda values=values: world.all_reduce_(values), world)  # type: ignore[misc]
        result.append([float(values.nbytes), seconds])
    return result


def _together(communicate: Callable[[], None], world: Communicator) -> float:
    """Median of a fixed number of repetitions, equal on both ranks."""
    seconds = []
    for _ in range(10):
        world.barrier()
        started = time.perf_counter()
        communicate()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
