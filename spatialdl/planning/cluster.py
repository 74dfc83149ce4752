"""A cluster as the planner sees it: how fast devices compute, what they hold, how they talk."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spatialdl.comm.dry import Axis, Talk
from spatialdl.planning.ledger import RankOperation

KINDS = {
    "conv": "convolution",
    "conv_input": "gradient of a convolution's input",
    "conv_strided_input": "the same of one with strides",
    "conv_weight": "gradient of a convolution's weight",
    "matmul": "matrix product",
    "norm": "BatchNorm in training, statistics and all",
    "normalise": "BatchNorm with given statistics",
    "statistics": "mean and variance",
    "norm_backward": "gradients of BatchNorm",
    "norm_sums": "gradients of BatchNorm's weights alone",
    "pool": "pooling",
    "pool_backward": "gradient of pooling",
    "in_place": "pointwise, in place",
    "pointwise": "pointwise, and all else",
}
"""Kinds of operations that have a rate of their own."""

_IN_PLACE_OF = {"conv_input": "conv", "conv_strided_input": "conv", "conv_weight": "conv"}
_IN_PLACE_OF |= {"matmul": "conv"}
"""Whose rate others take if they have none; else that of "pointwise"."""


@dataclass(frozen=True)
class Rate:
    """Seconds of an operation: some for itself, some for its operations, some for its bytes.

    Attributes:
        seconds: of an operation of no size.
        flops_per_second: infinite where only bytes count.
        bytes_per_second: pairs (bytes, bytes a second), ascending; between them it changes with
            the logarithm, beyond them not at all.
    """

    seconds: float
    flops_per_second: float
    bytes_per_second: tuple[tuple[float, float], ...]

    def of(self, flops: float, size: float) -> float:
        return self.seconds + flops / self.flops_per_second + size / self._speed(size)

    def _speed(self, size: float) -> float:
        points = self.bytes_per_second
        place = bisect_left(points, (size, 0.0))
        if place in (0, len(points)):
            return points[min(place, len(points) - 1)][1]
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        share = math.log(size / x0) / math.log(x1 / x0)
        return float(y0 * (y1 / y0) ** share)


@dataclass(frozen=True)
class Link:
    """A way between two ranks."""

    seconds: float
    bytes_per_second: float

    def of(self, size: float) -> float:
        return self.seconds + size / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """What ranks run on.

    Attributes:
        memory_gb: of a device (10**9 bytes), of the machine where ranks share cores; None: any.
        ranks_per_node: that talk within the node.
        cores: that all ranks of the only node share; None: each rank has a device of its own.
        rates: of a rank while all others compute, too; on CPUs with one thread.
        rates_alone: of the only rank, with a thread a core.
        lone_speed: of a rank while all others wait, as a multiple of `rates`.
        base_mb: memory (2**20 bytes) that a rank takes before it trains.
        within_node, between_nodes: ways between ranks.
        reduce: the way of sums within a node, if they do not take `within_node`.
        disk_bytes_per_second: to or from a node's disk, where virtual tiles store tensors; all
            ranks of the node share it.
        host_bytes_per_second: between a device and pinned memory of its host.
    """

    name: str
    memory_gb: float | None
    ranks_per_node: int
    cores: int | None
    rates: Mapping[str, Rate]
    rates_alone: Mapping[str, Rate]
    lone_speed: float
    base_mb: float
    base_mb_alone: float
    within_node: Link
    between_nodes: Link
    reduce: Link | None = None
    disk_bytes_per_second: float = 1e9
    host_bytes_per_second: float = 2e10

    def threads(self, ranks: int) -> int:
        """Threads that the command gives to each of so many ranks on CPUs."""
        return max(1, (self.cores or 1) // ranks)

    def seconds(self, work: Iterable[RankOperation], ranks: int) -> float:
        """Time of operations on one of so many ranks."""
        return sum(self._operation(one, ranks) for one in work)

    def _operation(self, work: RankOperation, ranks: int) -> float:
        busy = self._rate(self.rates, work.kind).of(work.flops, work.bytes)
        threads = self.threads(ranks)
        if threads == 1:
            return busy
        alone = self._rate(self.rates_alone, work.kind).of(work.flops, work.bytes)
        share = math.log(threads) / math.log(self.cores or threads)
        return float(busy ** (1 - share) * alone**share)

    @staticmethod
    def _rate(rates: Mapping[str, Rate], kind: str) -> Rate:
        other = _IN_PLACE_OF.get(kind, "pointwise")
        return rates[kind] if kind in rates else rates.get(other, rates["pointwise"])

    def memory_bytes(self, ranks: int) -> float | None:
        """What each of so many ranks may take."""
        if self.memory_gb is None:
            return None
        return 1e9 * self.memory_gb / (ranks if self.cores is not None else 1)

    def base_bytes(self, ranks: int) -> float:
        return 2**20 * (self.base_mb_alone if ranks == 1 else self.base_mb)

    def store_bytes_per_second(self, store: str, ranks: int) -> float:
        """What each of so many ranks has of the way to a store, "disk" or "host"."""
        if store == "host":
            return self.host_bytes_per_second
        return self.disk_bytes_per_second / min(ranks, self.ranks_per_node)

    def nodes(self, first: int, last: int) -> int:
        """Nodes between two ranks of the world: 0 within one."""
        return last // self.ranks_per_node - first // self.ranks_per_node

    def link(self, first: int, last: int) -> Link:
        """The way between two ranks of the world."""
        return self.between_nodes if self.nodes(first, last) else self.within_node

    def talking(self, talks: Iterable[Talk], ranks: Mapping[Axis, Sequence[int]]) -> float:
        """Time of what one of some ranks says to the others.

        Args:
            ranks: of the axes on which there are several.
        """
        total = 0.0
        for talk in talks:
            others = ranks[talk.axis]
            if talk.kind == "exchange":
                total += self.link(min(others), max(others)).of(talk.bytes)
            else:
                total += self.all_reduce(others, talk.bytes)
        return total

    def all_reduce(self, ranks: Sequence[int], size: float) -> float:
        """By trees for little, by rings within nodes and then between them for much."""
        if len(ranks) == 1:
            return 0.0
        nodes = Counter(rank // self.ranks_per_node for rank in ranks)
        inside, between = max(nodes.values()), len(nodes)
        within = self.reduce or self.within_node
        seconds = _tree(within, inside) + _tree(self.between_nodes, between)
        seconds += _ring(within, inside, size)
        return seconds + _ring(self.between_nodes, between, size / inside)


def _tree(link: Link, ranks: int) -> float:
    return 2 * math.ceil(math.log2(ranks)) * link.seconds if ranks > 1 else 0.0


def _ring(link: Link, ranks: int, size: float) -> float:
    """Reduce-scatter and all-gather: every rank sends 2 (n - 1) / n of the bytes."""
    return 2 * (ranks - 1) / ranks * size / link.bytes_per_second if ranks > 1 else 0.0


def cluster_of(settings: Mapping[str, Any]) -> Cluster:
    """A cluster from a configuration, or from what was measured.

    Raises:
        ValueError: if figures are missing or make no sense.
    """
    known = set(Cluster.__dataclass_fields__)
    if strange := sorted(set(settings) - known):
        raise ValueError(f"cluster.{strange[0]} is unknown: take one of {', '.join(sorted(known))}")
    given = dict(settings)
    try:
        rates = _rates(given.pop("rates"))
        alone = _rates(given.pop("rates_alone", None) or {}) or rates
        given |= {key: _link(given[key]) for key in ("within_node", "between_nodes")}
        given.setdefault("base_mb_alone", given["base_mb"])
        if given.get("reduce") is not None:
            given["reduce"] = _link(given["reduce"])
        made = Cluster(rates=rates, rates_alone=alone, **given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"cluster={settings.get('name')} is not whole: {error}") from error
    if "pointwise" not in made.rates or made.ranks_per_node < 1:
        raise ValueError(
            f"cluster={made.name} needs cluster.rates.pointwise, and cluster.ranks_per_node of at "
            f"least 1, got {made.ranks_per_node}"
        )
    return made


def _link(given: Mapping[str, Any]) -> Link:
    return Link(float(given["seconds"]), float(given["bytes_per_second"]))


def _rates(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Rate]:
    if strange := sorted(set(settings) - set(KINDS)):
        raise ValueError(f"cluster.rates.{strange[0]} is unknown: take one of {', '.join(KINDS)}")
    return {kind: _rate(given) for kind, given in settings.items()}


def _rate(given: Mapping[str, Any]) -> Rate:
    flops = given.get("flops_per_second")
    speed: Any = given["bytes_per_second"]
    points: Sequence[Any] = speed if isinstance(speed, Sequence) else [[1.0, speed]]
    return Rate(
        float(given.get("seconds", 0.0)),
        math.inf if flops is None else float(flops),
        tuple((float(size), float(rate)) for size, rate in points),
    )
