"""The axes of a mesh of ranks, by name: how many ranks each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from spatialdl.parallel.layout import spatial_names


@dataclass(frozen=True)
class Axes:
    """The degrees of parallelism of a mesh; their product is its number of ranks.

    Ranks are numbered axis by axis in the order below, the last one fastest.

    Attributes:
        data: replicas of the network, each with samples of its own.
        stage: stages into which the network is cut, one after the other.
        spatial: parts of each spatial dim of an image: one number for signals, (rows, columns) for
            images, (slices, rows, columns) for volumes.
        batch: ranks of a stage that divide the samples of a micro-batch, where they do not divide
            images.
        tensor: ranks that divide the channels of weights and activations.

    Raises:
        ValueError: if a degree is no whole number of at least 1, there are no one to three spatial
            axes, or a stage divides images and samples.
    """

    data: int = 1
    stage: int = 1
    spatial: tuple[int, ...] = (1, 1)
    batch: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.spatial) <= 3:
            raise ValueError(
                "a grid has one to three numbers, as (rows, columns) for images, got "
                f"{self.spatial}"
            )
        for name, degree in self.degrees.items():
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(
                    f"the {name} axis of a mesh needs at least 1 rank, got {degree!r}: {self}"
                )
        if self.batch > 1 and self.parts > 1:
            raise ValueError(f"a stage divides either images or samples, got {self}")

    @cached_property
    def degrees(self) -> Mapping[str, int]:
        """Every axis by its name; the spatial ones as ``rows`` and ``columns`` and so on."""
        spatial = zip(spatial_names(len(self.spatial)), self.spatial, strict=True)
        return {
            "data": self.data,
            "stage": self.stage,
            **dict(spatial),
            "batch": self.batch,
            "tensor": self.tensor,
        }

    def replicated(self, sharded: bool = False) -> tuple[str, ...]:
        """The axes along which ranks hold copies of a parameter, sharded over replicas or not."""
        divided = ("stage", "tensor", "data" if sharded else "")
        return tuple(name for name in self.degrees if name not in divided)

    @property
    def parts(self) -> int:
        """Tiles of an image."""
        return prod(self.spatial)

    @property
    def size(self) -> int:
        """All ranks."""
        return prod(self.degrees.values())

    def __str__(self) -> str:
        """The arithmetic: ``data 2 x rows 2 x columns 1 = 4 ranks``; other axes of 1 are left out.

        Degrees that are no numbers are written as they are.
        """
        shown = {
            name: degree
            for name, degree in self.degrees.items()
            if degree != 1 or name not in ("stage", "batch", "tensor")
        }
        product = " x ".join(f"{name} {degree}" for name, degree in shown.items())
        if not all(isinstance(degree, int) for degree in shown.values()):
            return product
        return f"{product} = {self.size} rank{'' if self.size == 1 else 's'}"
