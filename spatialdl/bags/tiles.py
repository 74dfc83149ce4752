"""The tiles of a slide that this rank has, slice after slice, read ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.layout import Layout, even_bounds

ReadTiles = Callable[[int, int], Tensor]
"""Gives the tiles [start, stop) of a slide, (stop - start, C, h, w), the same ones every time."""


class OwnTiles:
    """The range of a slide's tiles that this rank has. Every rank of the grid must make it.

    Args:
        tiles: this rank's own, or a function that reads tiles of the slide.
        count: tiles of the whole slide; needed for a function, whose tiles are divided evenly.
        mesh: with a grid of one number.
        device: to which the tiles are moved.

    Attributes:
        layout: of the bag: one sample, cut where the ranges of the ranks end.
        own: this rank's range, in the numbers of the slide.

    Raises:
        ValueError: on all ranks, if there are no tiles, or ranks disagree on their number.
    """

    def __init__(
        self, tiles: Tensor | ReadTiles, count: int | None, mesh: Mesh, device: torch.device
    ) -> None:
        self._tiles, self._device = tiles, device
        given = len(tiles) if isinstance(tiles, Tensor) and tiles.dim() > 0 else None
        fault = _fault(tiles, count)
        everybody = mesh.grid_comm.allgather((given, count, fault))
        faults = [f"rank {rank}: {one[2]}" for rank, one in enumerate(everybody) if one[2]]
        if faults:
            raise ValueError("; ".join(faults))
        counts, totals = [one[0] for one in everybody], {one[1] for one in everybody}
        if len(totals) > 1 or len({one is None for one in counts}) > 1:
            raise ValueError(
                f"ranks have other tiles of one slide: own tiles {counts}, count "
                f"{[one[1] for one in everybody]}: give all ranks of a grid tensors, or all of "
                "them a function and the same count"
            )
        if count is not None and given is None:
            bounds = even_bounds(count, mesh.parts)
        else:
            bounds = (0, *accumulate(number or 0 for number in counts))
        if count is not None and bounds[-1] != count:
            raise ValueError(
                f"the slide has count={count} tiles, but ranks bring {counts}, together "
                f"{bounds[-1]}: each rank brings its own range, not all tiles"
            )
        if bounds[-1] == 0:
            raise ValueError("a slide without tiles: leave it out, as it has no features")
        self.layout = Layout((0, 1), (bounds,))
        self.own = range(bounds[mesh.part], bounds[mesh.part + 1])

    def slices(self, size: int) -> Iterator[tuple[range, Tensor]]:
        """The own tiles in slices of `size`, each with its range; the next one is being read."""
        ranges = [self.own[start : start + size] for start in range(0, len(self.own), size)]
        if isinstance(self._tiles, Tensor):
            yield from ((part, self._read(part)) for part in ranges)
            return
        with ThreadPoolExecutor(1, "tiles") as reader:
            coming = [reader.submit(self._read, part) for part in ranges[:1]]
            for number, part in enumerate(ranges):
                tiles = coming.pop().result()
                coming += [reader.submit(self._read, next_) for next_ in ranges[number + 1 :][:1]]
                yield part, tiles
                del tiles

    def all(self) -> Tensor:
        """All own tiles at once.

        Raises:
            ValueError: if there are none and nobody knows their shape.
        """
        if isinstance(self._tiles, Tensor):
            return self._tiles.to(self._device)
        return self._read(self.own)

    def _read(self, part: range) -> Tensor:
        if isinstance(self._tiles, Tensor):
            tiles = self._tiles[part.start - self.own.start : part.stop - self.own.start]
        else:
            tiles = self._tiles(part.start, part.stop)
            if not isinstance(tiles, Tensor) or tiles.dim() == 0 or len(tiles) != len(part):
                found = tuple(tiles.shape) if isinstance(tiles, Tensor) else type(tiles).__name__
                raise ValueError(
                    f"tiles({part.start}, {part.stop}) must give {len(part)} tiles as a tensor, "
                    f"got {found}"
                )
        return tiles.to(self._device, non_blocking=True)


def _fault(tiles: Tensor | ReadTiles, count: int | None) -> str:
    """What is wrong with this rank's arguments; empty if nothing is."""
    if isinstance(tiles, Tensor):
        if tiles.dim() == 0:
            return "tiles are a tensor (n, C, h, w), got a scalar"
        return "tiles require a gradient, which they never get" if tiles.requires_grad else ""
    if not callable(tiles):
        return f"tiles are a tensor or a function of (start, stop), got {type(tiles).__name__}"
    if count is None:
        return "tiles are read by a function: give count=, the number of tiles of the slide"
    return f"count={count} must not be negative" if count < 0 else ""
