"""``comm.check``: before ranks talk they compare what they are about to say.

A rank that takes another branch than its peers would hang or, worse, add up unrelated numbers.
With the check on, every communication first compares its own description (operation, direction,
plan) with the peers', and a difference ends the job with both sides named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spatialdl.errors import CommMismatch

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

TEXT_BYTES = 256


class _Switch:
    on = os.environ.get("SPATIALDL_COMM_CHECK", "") == "1"


def enable(on: bool = True) -> None:
    """Switch the check on or off; all ranks must do so alike."""
    _Switch.on = on


def enabled() -> bool:
    return _Switch.on


def agree(comm: Communicator, text: str) -> None:
    """Compare `text` over the ranks of `comm`, if the check is on.

    Raises:
        CommMismatch: naming the first rank that says something else.
    """
    if not _Switch.on:
        return
    mine = encode(text)
    everybody = comm.all_gather(as_tensor(mine))
    for rank in range(comm.size):
        theirs = bytes(everybody[rank].numpy())
        if theirs != mine:
            raise CommMismatch(
                f"ranks do different things: rank {comm.rank} is at '{text}', rank {rank} at "
                f"'{decode(theirs)}'; look for control flow that depends on the rank"
            )


def encode(text: str) -> bytes:
    """`text` as a message of fixed length."""
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def as_tensor(message: bytes) -> Tensor:
    """A message as the transports take it."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def decode(message: bytes) -> str:
    return message.rstrip(b"\0").decode(errors="replace")
