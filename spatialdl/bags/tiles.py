"""The local tiles of a slide, slice by slice, with prefetching in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.layout import Layout, even_bounds

ReadTiles = Callable[[int, int], Tensor]
"""Reads tiles [start, stop) of a slide, (stop - start, C, h, w), deterministically."""


class OwnTiles:
    """The local range of a slide's tiles. Its creation is collective over the grid.

    Args:
        tiles: the local tiles, or a function that reads tiles of the slide.
        count: tiles of the whole slide; required for a function, whose tiles are split evenly.
        mesh: with a grid of one axis.
        device: to which the tiles are moved.

    Attributes:
        layout: of the bag: one sample, split at the ends of the ranks' ranges.
        own: the local range, as indices into the tiles of the slide.

    Raises:
        ValueError: on all ranks, if there are no tiles, or their numbers are inconsistent.
    """

    def __init__(
        self, tiles: Tensor | ReadTiles, count: int | None, mesh: Mesh, device: torch.device
    ) -> None:
        self._tiles, self._device = tiles, device
        local = len(tiles) if isinstance(tiles, Tensor) and tiles.dim() > 0 else None
        fault = _fault(tiles, count)
        all_ranks = mesh.grid_comm.allgather((local, count, fault))
        faults = [f"rank {rank}: {each[2]}" for rank, each in enumerate(all_ranks) if each[2]]
        if faults:
            raise ValueError("; ".join(faults))
        counts, totals = [each[0] for each in all_ranks], {each[1] for each in all_ranks}
        if len(totals) > 1 or len({number is None for number in counts}) > 1:
            raise ValueError(
                f"tiles of one slide are inconsistent across ranks: local tiles {counts}, count "
                f"{[each[1] for each in all_ranks]}: pass tensors on all ranks of a grid, or a "
                "function and the same count on all of them"
            )
        if count is not None and local is None:
            bounds = even_bounds(count, mesh.parts)
        else:
            bounds = (0, *accumulate(number or 0 for number in counts))
        if count is not None and bounds[-1] != count:
            raise ValueError(
                f"the slide has count={count} tiles, but ranks passed {counts}, in total "
                f"{bounds[-1]}: each rank must pass its own range, not all tiles"
            )
        if bounds[-1] == 0:
            raise ValueError("the slide has no tiles; remove it")
        self.layout = Layout((0, 1), (bounds,))
        self.own = range(bounds[mesh.part], bounds[mesh.part + 1])

    def slices(self, size: int) -> Iterator[tuple[range, Tensor]]:
        """Yield the local tiles in slices of `size`, each with its range; prefetches the next."""
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
        """Return all local tiles.

        Raises:
            ValueError: the function did not return the local range.
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
                shape = tuple(tiles.shape) if isinstance(tiles, Tensor) else type(tiles).__name__
                raise ValueError(
                    f"tiles({part.start}, {part.stop}) must return {len(part)} tiles as a tensor, "
                    f"got {shape}"
                )
        return tiles.to(self._device, non_blocking=True)


def _fault(tiles: Tensor | ReadTiles, count: int | None) -> str:
    """Describe an error in the arguments of this rank; empty if there is none."""
    if isinstance(tiles, Tensor):
        if tiles.dim() == 0:
            return "tiles must be a tensor (n, C, h, w), got a scalar"
        return "tiles must not require a gradient" if tiles.requires_grad else ""
    if not callable(tiles):
        return f"tiles must be a tensor or a function of (start, stop), got {type(tiles).__name__}"
    if count is None:
        return "tiles are read by a function: pass count=, the number of tiles of the slide"
    return f"count={count} must not be negative" if count < 0 else ""
