"""Point-to-point messages for torch.distributed, which never queue behind collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Lock

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.backend.calls import Call, seconds
from spatialdl.comm.backend.host import (
    check_counts,
    dense,
    give_back,
    message,
    queued_before,
    room_for,
    wait_in_stream,
)
from spatialdl.torch_internals import Work


class MessageWork(Work):
    """A pending message.

    Args:
        request: MPI request.
        tensor: tensor of the program.
        held: memory that MPI reads or writes: the tensor itself, or a copy on the host.
        incoming: whether it is received.
    """

    def __init__(
        self, call: Call, request: MPI.Request, tensor: Tensor, held: Tensor, incoming: bool
    ) -> None:
        super().__init__()
        self._call, self._request, self._lock = call, request, Lock()
        self._tensor, self._held, self._incoming = tensor, held, incoming
        self._done, self._source = False, -1
        self._before = queued_before([tensor] if incoming else [])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensor is received, or may be modified again.

        Aborts the job after the timeout, by default that of the group.

        Raises:
            RuntimeError: if a message of another size was received.
        """
        status = MPI.Status()
        if timeout is not None:
            self._call.timeout_s = seconds(timeout, self._call.timeout_s)
        with self._lock:
            if not self._done:
                self._done = True  # MPI releases the memory in any case
                self._call.run(partial(self._request.Wait, status))
                self._finish(status)
        return True

    def is_completed(self) -> bool:
        status = MPI.Status()
        with self._lock:
            if not self._done and self._request.Test(status):
                self._done = True
                self._finish(status)
            return self._done

    def is_over(self) -> bool:
        """Whether the reference can be dropped: received, cancelled, or sent."""
        return self._done or (not self._incoming and self.is_completed())

    def is_success(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._tensor]

    def source_rank(self) -> int:
        """Rank in the group that sent the message."""
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future: MPI has no thread that could complete it later."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[self._tensor.device] if not self._tensor.is_cpu else []
        )
        future.set_result(self.result())
        return future

    def cancel(self) -> None:
        """Cancel a receive without a matching send."""
        with self._lock:
            if not self._done:
                self._request.Cancel()
                self._request.Wait()
                self._done = True

    def _finish(self, status: MPI.Status) -> None:
        if not self._incoming:
            return
        self._source = status.Get_source()
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes != self._held.nbytes:
            raise RuntimeError(
                f"{self._call}: rank {self._source} has sent {nbytes} bytes, but the tensor has "
                f"{self._held.nbytes}"
            )
        wait_in_stream(self._before)
        give_back(self._tensor, self._held)


class GroupMessages:
    """Pending messages of a group.

    Keeps references until they are complete: a program may drop the work of a message that is
    still being sent.

    Args:
        comm: returns the communicator, if it may be used.
    """

    def __init__(self, comm: Callable[[], MPI.Intracomm]) -> None:
        self._comm = comm
        self._open: list[MessageWork] = []

    def send(self, call: Call, tensor: Tensor, rank: int, tag: int) -> MessageWork:
        held, comm = dense(tensor), self._comm()
        return self._add(call, tensor, held, lambda: comm.Isend(message(held), rank, tag))

    def receive(self, call: Call, tensor: Tensor, rank: int | None, tag: int) -> MessageWork:
        """Receive from a rank, or from any rank."""
        held, comm = room_for(tensor), self._comm()
        source = MPI.ANY_SOURCE if rank is None else rank
        start = lambda: comm.Irecv(message(held), source, tag)  # noqa: E731
        return self._add(call, tensor, held, start, incoming=True)

    def close(self) -> None:
        """Wait for all sends, and cancel all receives."""
        for work in self._open:
            if work._incoming:
                work.cancel()
            else:
                work.wait()
        self._open.clear()

    def _add(
        self,
        call: Call,
        tensor: Tensor,
        held: Tensor,
        start: Callable[[], MPI.Request],
        incoming: bool = False,
    ) -> MessageWork:
        check_counts(call.name, tensor.numel())
        self._open = [work for work in self._open if not work.is_over()]
        work = MessageWork(call, start(), tensor, held, incoming)
        self._open.append(work)
        return work
