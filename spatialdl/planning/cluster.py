"""Model of a cluster: compute rates, memory and links of its devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spatialdl.comm.dry import Axis, Talk
from spatialdl.spatial.streaming.ledger import RankOperation

KINDS = {
    "conv": "convolution",
    "conv_input": "gradient of a convolution's input",
    "conv_strided_input": "gradient of a strided convolution's input",
    "conv_weight": "gradient of a convolution's weight",
    "matmul": "matrix product",
    "norm": "BatchNorm in training, with statistics",
    "normalise": "BatchNorm with given statistics",
    "statistics": "mean and variance",
    "norm_backward": "gradients of BatchNorm",
    "norm_sums": "gradients of BatchNorm's weights only",
    "pool": "pooling",
    "pool_backward": "gradient of pooling",
    "in_place": "pointwise, in place",
    "pointwise": "pointwise, and all else",
}
"""Kinds of operations with separate rates."""

_IN_PLACE_OF = {"conv_input": "conv", "conv_strided_input": "conv", "conv_weight": "conv"}
_IN_PLACE_OF |= {"matmul": "conv"}
"""Kinds that replace missing rates; "pointwise" for all other kinds."""


@dataclass(frozen=True)
class Rate:
    """Seconds of an operation: a constant, plus time for its flops, plus time for its bytes.

    Attributes:
        seconds: the constant.
        flops_per_second: infinite where only bytes count.
        bytes_per_second: pairs (bytes, bytes per second), ascending; interpolated over the
            logarithm, constant beyond them.
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
    """Latency and bandwidth between two ranks."""

    seconds: float
    bytes_per_second: float

    def of(self, size: float) -> float:
        return self.seconds + size / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """Hardware that ranks run on.

    Attributes:
        memory_gb: of a device (10**9 bytes), of the machine where ranks share cores; None for no
            limit.
        ranks_per_node: number of ranks on a node.
        cores: shared by all ranks of the only node; None if each rank has its own device.
        rates: of a rank while all others compute, too; on CPUs with one thread.
        rates_alone: of a single rank, with a thread per core.
        lone_speed: of a rank while all others wait, as a multiple of `rates`.
        base_mb: memory (2**20 bytes) of a rank before training.
        within_node, between_nodes: links between ranks.
        reduce: link of all-reduces within a node, if other than `within_node`.
        disk_bytes_per_second: to or from a node's disk, where virtual tiles store tensors; shared
            by all ranks of the node.
        host_bytes_per_second: between a device and pinned host memory.
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
        """Threads that the command gives to each of `ranks` ranks on CPUs."""
        return max(1, (self.cores or 1) // ranks)

    def seconds(self, work: Iterable[RankOperation], ranks: int) -> float:
        """Seconds of operations on one of `ranks` ranks."""
        return sum(self._operation(operation, ranks) for operation in work)

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
        """Memory limit of each of `ranks` ranks."""
        if self.memory_gb is None:
            return None
        return 1e9 * self.memory_gb / (ranks if self.cores is not None else 1)

    def base_bytes(self, ranks: int) -> float:
        return 2**20 * (self.base_mb_alone if ranks == 1 else self.base_mb)

    def store_bytes_per_second(self, store: str, ranks: int) -> float:
        """Bandwidth of each of `ranks` ranks to a store, "disk" or "host"."""
        if store == "host":
            return self.host_bytes_per_second
        return self.disk_bytes_per_second / min(ranks, self.ranks_per_node)

    def nodes(self, first: int, last: int) -> int:
        """Node distance of two ranks of the world: 0 within a node."""
        return last // self.ranks_per_node - first // self.ranks_per_node

    def link(self, first: int, last: int) -> Link:
        """The link between two ranks of the world."""
        return self.between_nodes if self.nodes(first, last) else self.within_node

    def communication_seconds(
        self, messages: Iterable[Talk], ranks: Mapping[Axis, Sequence[int]]
    ) -> float:
        """Seconds of one rank's messages.

        Args:
            ranks: by axis, of those with several ranks.
        """
        total = 0.0
        for message in messages:
            group = ranks[message.axis]
            if message.kind == "exchange":
                total += self.link(min(group), max(group)).of(message.bytes)
            else:
                total += self.all_reduce(group, message.bytes)
        return total

    def all_reduce(self, ranks: Sequence[int], size: float) -> float:
        """Seconds of an all-reduce: trees for latency, rings within and between nodes for bytes."""
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
    """Seconds of reduce-scatter and all-gather: a rank sends 2 (n - 1) / n of the bytes."""
    return 2 * (ranks - 1) / ranks * size / link.bytes_per_second if ranks > 1 else 0.0


def cluster_of(settings: Mapping[str, Any]) -> Cluster:
    """Make a cluster from a configuration, or from measurements.

    Raises:
        ValueError: if values are missing or invalid.
    """
    known = set(Cluster.__dataclass_fields__)
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"cluster.{unknown[0]} is unknown: take one of {', '.join(sorted(known))}")
    values = dict(settings)
    try:
        rates = _rates(values.pop("rates"))
        alone = _rates(values.pop("rates_alone", None) or {}) or rates
        values |= {key: _link(values[key]) for key in ("within_node", "between_nodes")}
        values.setdefault("base_mb_alone", values["base_mb"])
        if values.get("reduce") is not None:
            values["reduce"] = _link(values["reduce"])
        cluster = Cluster(rates=rates, rates_alone=alone, **values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"cluster={settings.get('name')} is incomplete: {error}") from error
    if "pointwise" not in cluster.rates or cluster.ranks_per_node < 1:
        raise ValueError(
            f"cluster={cluster.name} needs cluster.rates.pointwise, and cluster.ranks_per_node of "
            f"at least 1, got {cluster.ranks_per_node}"
        )
    return cluster


def _link(values: Mapping[str, Any]) -> Link:
    return Link(float(values["seconds"]), float(values["bytes_per_second"]))


def _rates(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Rate]:
    if unknown := sorted(set(settings) - set(KINDS)):
        raise ValueError(f"cluster.rates.{unknown[0]} is unknown: take one of {', '.join(KINDS)}")
    return {kind: _rate(values) for kind, values in settings.items()}


def _rate(values: Mapping[str, Any]) -> Rate:
    flops = values.get("flops_per_second")
    speed: Any = values["bytes_per_second"]
    points: Sequence[Any] = speed if isinstance(speed, Sequence) else [[1.0, speed]]
    return Rate(
        float(values.get("seconds", 0.0)),
        math.inf if flops is None else float(flops),
        tuple((float(size), float(rate)) for size, rate in points),
    )
