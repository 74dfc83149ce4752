"""The slides or volumes of a batch as a table on the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spatialdl.text import aligned, fitted

_LONGEST_NAME, _LONGEST_REMARK = 40, 100


@dataclass(frozen=True)
class Report:
    """What came out of a slide; `problem` says why nothing did, `failed` if the command fails."""

    name: str
    tiles: int = 0
    predicted: str = ""
    value: float | None = None
    remark: str = ""
    problem: str = ""
    failed: bool = False

    @property
    def status(self) -> str:
        """ "processed", "damaged" where some tiles could not be read, or "failed"."""
        return "failed" if self.problem else "damaged" if self.failed else "processed"


def table(reports: Sequence[Report], *, volumes: bool = False) -> str:
    """A row a slide: tiles, the class with the largest mean probability, and that.

    Args:
        volumes: whether they are volumes, which have no tiles.
    """
    rows = [("slide", "tiles", "predicted", "mean", "")]
    if volumes:
        rows = [("volume", "", "predicted", "mean", "")]
    for one in reports:
        value = "" if one.value is None else f"{one.value:.3f}"
        remark = f"failed: {one.problem}" if one.problem else one.remark
        tiles = "" if one.problem or volumes else f"{one.tiles:,}"
        name = fitted(one.name, _LONGEST_NAME)
        rows.append((name, tiles, one.predicted, value, fitted(remark, _LONGEST_REMARK)))
    return "\n".join(aligned(rows, left=(0, 2, 4)))
