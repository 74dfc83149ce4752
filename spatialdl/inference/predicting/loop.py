"""One loop over the inputs of a command, and what the ranks of a command agree on.

The first rank of a team finds the result of an earlier run, or opens the input; all ranks of the
team process it, and its first rank has the result. A bad input does not end the others.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from spatialdl.comm.abort import describe_error, install_abort_hook
from spatialdl.comm.capacity import check_capacity
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.launch import end_with_launcher, launched, start_ranks
from spatialdl.comm.liveness import print_last, report_exit, report_start
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import start_world
from spatialdl.data.outcomes import FAILED, run_command
from spatialdl.errors import ShardError, SlideError


@dataclass(frozen=True)
class Team:
    """A group of ranks that processes one input at a time.

    Attributes:
        ranks: communicator of the team.
        number: index of the team, below `count`.
    """

    ranks: Communicator
    number: int = 0
    count: int = 1


class Work(Protocol):
    """What is done with each input."""

    def known(self, job: Any) -> Any:
        """The result of an earlier run; None if there is none. On the first rank of the team."""

    def open(self, job: Any) -> Any:
        """The opened input, which can be pickled. On the first rank of the team."""

    def run(self, job: Any, opened: Any) -> Any:
        """The result of an input; collective over the team, with the same errors on its ranks."""

    def failed(self, job: Any, opened: Any, error: Exception) -> Any:
        """The result of an input with an error; `opened` is None if it could not be opened.

        Raises:
            Exception: the error, if it ends the command.
        """


def process(jobs: Sequence[Any], team: Team, world: Communicator, work: Work) -> Iterator[Any]:
    """Process all inputs; collective over `world`. Yields results on rank 0, in order.

    Teams synchronise after each input, so no team waits longer than one input takes.
    """
    for first in range(0, len(jobs), team.count):
        at_once = jobs[first : first + team.count]
        results = [
            (team.number, _processed(job, team.ranks, work)) for job in at_once[team.number :][:1]
        ]
        gathered = chain.from_iterable(world.gather(results if team.ranks.rank == 0 else []) or [])
        yield from (result for _, result in sorted(gathered, key=lambda pair: pair[0]))


def _processed(job: Any, ranks: Communicator, work: Work) -> Any:
    result = opened = None
    if ranks.rank == 0:
        try:
            result = work.known(job)
            opened = work.open(job) if result is None else None
        except Exception as error:
            result = work.failed(job, None, error)
    result, opened = ranks.bcast((result, opened))
    if result is not None:
        return result
    try:
        return work.run(job, opened)
    except SlideError as error:
        return work.failed(job, opened, error)


class AgreedError(ValueError):
    """A ValueError or OSError of one rank, raised on all.

    Args:
        text: message of the error.
        is_io: whether it was an OSError.
    """

    def __init__(self, text: str, is_io: bool) -> None:
        super().__init__(text)
        self.is_io = is_io


def problem_of(error: Exception) -> str:
    """Why an input failed.

    Raises:
        Exception: the error, if it is none of an input.
    """
    if not isinstance(error, SlideError | ShardError | OSError):
        raise error
    return str(error)


@contextmanager
def agreeing(world: Communicator) -> Iterator[None]:
    """Raise an error of any rank on all ranks at the end of the block; one rank: unchanged.

    Ranks that fail must communicate in the block as the others do.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    problem = None if own is None else (str(own), isinstance(own, OSError))
    problems = [one for one in world.allgather(problem) if one is not None]
    if own is not None and (world.size == 1 or not isinstance(own, ValueError | OSError)):
        raise own
    if problems:
        raise AgreedError(*problems[0]) from own


# --- commands with options of argparse


@dataclass(frozen=True)
class RankCommand:
    """A command that runs in this process, as one of several ranks, or on ranks it launches.

    Attributes:
        module: its module, which launched ranks run.
        parse: options of a command line; exits after help or on misused options.
        check: checks options before ranks start; returns the number of ranks to launch.
        run: does the work on every rank, and returns the exit code; errors of single ranks are
            raised as `AgreedError`.
        misused: exit code of a ValueError; that of an OSError is 1.
    """

    module: str
    parse: Callable[[Sequence[str]], Namespace]
    check: Callable[[Namespace], int]
    run: Callable[[Namespace, Communicator], int]
    misused: int = 1

    def main(self, argv: Sequence[str] | None) -> int:
        """Run the command.

        Args:
            argv: arguments of the command; those of the process if None.

        Returns:
            The exit code; 130 or 143 if it was interrupted or terminated.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        info = launched()
        if info is not None and info.size > 1:
            return self._as_rank(words, info.rank)
        run = partial(self._alone_or_launch, words)
        return run_command(run, misused=self.misused, describe=describe_error)

    def _alone_or_launch(self, words: Sequence[str]) -> int:
        options = self.parse(words)
        ranks = self.check(options)
        if ranks > 1:
            check_capacity(ranks)
            return start_ranks(ranks, self.module, words)
        return self.run(options, SingleProcess())

    def _as_rank(self, words: Sequence[str], rank: int) -> int:
        """Run as one of several ranks; an error of one rank ends all."""
        install_abort_hook()
        end_with_launcher()
        report_start(rank)
        world = start_world()
        try:
            options = self._parse_once(world, words)
            code = options if isinstance(options, int) else self.run(options, world)
        except AgreedError as error:
            if world.rank == 0:
                print_last(f"error: {describe_error(error)}")
            code = FAILED if error.is_io else self.misused
        world.barrier()  # otherwise a launcher may kill rank 0 before it prints the error
        if code:
            report_exit()
        return code

    def _parse_once(self, world: Communicator, words: Sequence[str]) -> Namespace | int:
        """Options that rank 0 parses, so that help and errors are printed once; or exit code."""
        found: Namespace | int = 0
        with agreeing(world):
            if world.rank == 0:
                try:
                    found = self.parse(words)
                except SystemExit as stop:
                    found = stop.code if isinstance(stop.code, int) else 0
        agreed: Namespace | int = world.bcast(found)
        return agreed
