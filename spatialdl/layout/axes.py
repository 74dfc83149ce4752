"""Named axes of a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from spatialdl.layout.layout import spatial_names


@dataclass(frozen=True)
class Axes:
    """Degrees of parallelism of a mesh; their product is the number of ranks.

    Ranks are numbered axis by axis in the order below, the last axis fastest.

    Attributes:
        data: number of replicas of the network, with different samples.
        stage: number of consecutive stages of the network.
        spatial: parts along each spatial dim of an image: one number for signals, (rows, columns)
            for images, (slices, rows, columns) for volumes.
        batch: ranks of a stage that divide the samples of a micro-batch instead of images.
        tensor: ranks that divide the channels of weights and activations.

    Raises:
        ValueError: if a degree is not an integer of at least 1, there are not one to three spatial
            axes, or a stage divides both images and samples.
    """

    data: int = 1
    stage: int = 1
    spatial: tuple[int, ...] = (1, 1)
    batch: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.spatial) <= 3:
            raise ValueError(
                "a grid has one to three numbers, such as (rows, columns) for images, got "
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
        """Degree of every axis by name; spatial axes as ``rows``, ``columns`` and so on."""
        spatial = zip(spatial_names(len(self.spatial)), self.spatial, strict=True)
        return {
            "data": self.data,
            "stage": self.stage,
            **dict(spatial),
            "batch": self.batch,
            "tensor": self.tensor,
        }

    def replicated(self, sharded: bool = False) -> tuple[str, ...]:
        """Axes along which ranks hold copies of a parameter; `sharded`: over data replicas."""
        divided = ("stage", "tensor", "data" if sharded else "")
        return tuple(name for name in self.degrees if name not in divided)

    @property
    def parts(self) -> int:
        """Number of tiles of an image."""
        return prod(self.spatial)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees.values())

    def __str__(self) -> str:
        """``data 2 x rows 2 x columns 1 = 4 ranks``; other axes of degree 1 are omitted.

        Degrees that are not numbers are written unchanged.
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
