"""The layouts that the pipeline benchmark compares."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule
from spatialdl.pipeline.schedule import make_schedule

ONE_AFTER_THE_OTHER = "layer parallel"
INTERLEAVE = 2


class Layout(NamedTuple):
    """A layout of a network on ranks; micro-batches are of one image."""

    name: str
    placement: Placement
    schedule: Schedule


def layouts(ranks: int, microbatches: int) -> list[Layout]:
    """Layer parallelism, pipelines of `microbatches`, and GEMS of one image a copy and of all."""
    plain = Placement(1, ((1, 1),) * ranks)
    dealt = Placement(1, ((1, 1),) * ranks * INTERLEAVE, INTERLEAVE)
    mirrored = Placement(1, ((1, 1),) * ranks, mirrored=True)

    def made(name: str, placement: Placement, kind: str, count: int, times: int = 1) -> Layout:
        return Layout(name, placement, make_schedule(kind, placement, count, times))

    return [
        made(ONE_AFTER_THE_OTHER, plain, "gpipe", 1),
        made("GPipe", plain, "gpipe", microbatches),
        made("1F1B", plain, "1f1b", microbatches),
        made("zero bubble", plain, "zero_bubble", microbatches),
        made("interleaved", dealt, "interleaved", microbatches),
        made("GEMS mast", mirrored, "mast", 2),
        made("GEMS master", mirrored, "master", microbatches, microbatches // 2),
        made("GEMS basic", mirrored, "basic", 2),
        made("GEMS basic, more", mirrored, "basic", microbatches),
    ]
