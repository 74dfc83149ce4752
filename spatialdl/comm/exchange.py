"""Exchanges along a plan, and the wrappers that all communication of tensors passes through.

Each wrapper adds one thing to every exchange, sum and gather, and knows nothing of the others; what
calls `start_exchange` or `collect` knows none of them. Outermost first:

    Recorded   recomputed parts of a network read received data from a tape
    Trimmed    free memory between tensors is returned to the system near the peak of a step
    Checked    ranks compare what they call; messages of unexpected size are mismatches
    Traced     spans of a rank's time, and seconds of waiting
    Noted      waits, for hang reports and for the limit of the watchdog
    Transport  the communicator itself

A dry run and a single process are communicators of their own, without wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from spatialdl.comm import allocator, check, replay, trace
from spatialdl.comm.boxed import Exchange
from spatialdl.comm.communicator import Communicator, Pending, UnderWay
from spatialdl.comm.plan import Plan
from spatialdl.comm.single_process import Completed, SingleProcess
from spatialdl.comm.waiting import noted

Result = TypeVar("Result")


class _Text(NamedTuple):
    """Description of a call without its tensors; formatted when it is shown."""

    name: str
    plan: Plan | None
    details: tuple[object, ...]

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.name} over ranks, {', '.join(map(str, self.details))}"
        direction = "adjoint" if self.details[0] else "forward"
        return f"{self.name} {direction} {self.plan.describe()}"


class Call(NamedTuple):
    """A communication of this rank.

    Attributes:
        do: method of the communicator.
        argument: its argument, an exchange or a tensor.
        text: description, the same on all ranks; kept longer than the argument.
    """

    comm: Communicator
    kind: trace.Kind
    do: Callable[[Any], Any]
    argument: Any
    text: _Text

    def __str__(self) -> str:
        if self.kind == "reduce":
            return self.text.name
        return f"exchange for {self.text.name} ({self.argument.plan.describe()})"

    def peers(self, pending: UnderWay) -> list[int]:
        """World ranks that the pending operation waits for."""
        peers: Sequence[int] = range(self.comm.size)
        if self.kind == "halo":
            plan = self.argument.plan
            peers = sorted({piece.peer for piece in (*plan.sends, *plan.receives)})
        elif self.kind == "hand-over":
            peers = pending.peers()
        return [self.comm.world_ranks[peer] for peer in peers]


class Transport:
    """Communication by the communicator itself."""

    def run(self, call: Call) -> Any:
        """Result of a collective that blocks."""
        return call.do(call.argument)

    def start(self, call: Call) -> UnderWay:
        """The pending operation that a call starts."""
        pending: UnderWay = call.do(call.argument)
        return pending

    def wait(self, call: Call, pending: UnderWay) -> None:
        """Wait for the pending operation of a call."""
        pending.wait()


class Wrapper(Transport):
    """Base of those that add something to every call."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def run(self, call: Call) -> Any:
        return self._inner.run(call)

    def start(self, call: Call) -> UnderWay:
        return self._inner.start(call)

    def wait(self, call: Call, pending: UnderWay) -> None:
        self._inner.wait(call, pending)


class Trimmed(Wrapper):
    """Returns free memory between tensors to the system, see `allocator`."""

    _holes = allocator.Holes()

    def start(self, call: Call) -> UnderWay:
        if call.argument.device.type == "cpu":
            self._holes.poll()
        return self._inner.start(call)


class Checked(Wrapper):
    """Compares what ranks call if they call it together, see `check`; keeps it for reports."""

    def run(self, call: Call) -> Any:
        check.agree(call.comm, call.text)
        return check.run_checked(call.comm, self._inner.run, call)

    def start(self, call: Call) -> UnderWay:
        if call.kind != "hand-over":
            check.agree(call.comm, call.text)
        return check.run_checked(call.comm, self._inner.start, call)

    def wait(self, call: Call, pending: UnderWay) -> None:
        check.run_checked(call.comm, self._inner.wait, call, pending)


class Traced(Wrapper):
    """Records the time in which this rank waits, see `trace`."""

    def run(self, call: Call) -> Any:
        with trace.span(call.kind, call.text.name):
            return self._inner.run(call)

    def wait(self, call: Call, pending: UnderWay) -> None:
        with trace.span(call.kind, call.text.name):
            self._inner.wait(call, pending)


class Noted(Wrapper):
    """Records what this rank waits for, and with which ranks, see `waiting`."""

    def run(self, call: Call) -> Any:
        return noted(call, None, self._inner.run, call)

    def wait(self, call: Call, pending: UnderWay) -> None:
        noted(call, partial(call.peers, pending), self._inner.wait, call, pending)


_DONE = Completed()


class Started:
    """A call that starts and waits through wrappers; holds nothing afterwards."""

    __slots__ = ("_call", "_pending", "_through")

    def __init__(self, call: Call, through: Transport) -> None:
        self._call: Call | None = call
        self._through = through
        self._pending = through.start(call)

    def wait(self) -> None:
        call, pending = self._call, self._pending
        if call is not None:
            self._call, self._pending = None, _DONE
            self._through.wait(call, pending)

    def is_done(self) -> bool:
        return self._pending.is_done()

    def peers(self) -> Sequence[int]:
        return self._pending.peers()


class Recorded:
    """Records received data on the tape of a forward, see `replay`; a replay starts no call.

    Args:
        inner: the wrappers of calls that are started.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def run(self, call: Call) -> Any:
        """Result of a collective that blocks."""
        return replay.once(partial(self._inner.run, call))

    def start(self, call: Call) -> Any:
        """The pending operation that a call starts, or its replay."""
        if call.kind == "halo" and replay.is_active():
            begin = partial(Started, call, self._inner)
            return replay.exchange_once(begin, call.argument.landing())
        return Started(call, self._inner)


_AROUND = Recorded(Trimmed(Checked(Traced(Noted(Transport())))))


def start_exchange(comm: Communicator, exchange: Exchange) -> UnderWay:
    """Start to send the plan's pieces to its peers, and to receive theirs.

    Collective over `comm`, also for ranks without peers, unless the exchange has a route. Sent
    pieces must not be modified, nor received pieces read, before ``wait()`` of the result.
    """
    if not exchange.plan.communicates:
        return Completed()
    if isinstance(comm, SingleProcess):
        return comm.start_exchange(exchange)
    kind: trace.Kind = "halo" if exchange.route is None else "hand-over"
    text = _Text(exchange.name, exchange.plan, (exchange.adjoint,))
    call = Call(comm, kind, comm.start_exchange, exchange, text)
    started: UnderWay = _AROUND.start(call)
    return started


def collect(
    comm: Communicator, do: Callable[[Tensor], Result], values: Tensor, name: str
) -> Result:
    """Result of a sum or gather over `comm`.

    Args:
        do: method of `comm`.
        name: operation name, for messages.
    """
    if isinstance(comm, SingleProcess):
        return do(values)
    text = _Text(name, None, (values.dtype, tuple(values.shape)))
    result: Result = _AROUND.run(Call(comm, "reduce", do, values, text))
    return result


def start_sum(comm: Communicator, values: Tensor, name: str) -> Pending:
    """Start to sum a contiguous tensor over `comm` in place."""
    text = _Text(name, None, (values.dtype, tuple(values.shape)))
    started: Pending = _AROUND.start(Call(comm, "reduce", comm.start_all_reduce, values, text))
    return started
