"""Confusion counts of pixels, computed on the ranks that hold the prediction."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.data.format import UNLABELLED
from spatialdl.errors import ShardError
from spatialdl.predicting.inputs import Input
from spatialdl.predicting.pieces import MapPiece

log = logging.getLogger("spatialdl.predict")

Counts = npt.NDArray[np.int64]


def confusion_of(
    world: Communicator, given: Input, pieces: Sequence[MapPiece], classes: int
) -> Counts | None:
    """Count pixels, int64 (classes, classes), by true and predicted class.

    Collective; all ranks get the sum. Unlabelled pixels are ignored. A mask that is unreadable or
    has an unknown class is logged.

    Args:
        pieces: this rank's pieces of the probability map.

    Returns:
        The counts; None without a valid mask.
    """
    if given.read_mask is None:
        return None
    own = np.zeros((classes, classes), np.int64)
    problem = ""
    try:
        for piece in pieces:
            own += _counted(given, piece, classes)
    except (ShardError, ValueError) as error:
        problem = str(error)
    first = next(filter(None, world.allgather(problem)), "")
    if first:
        if world.rank == 0:
            log.warning("%s: no confusion counts from its mask: %s", given.name, first)
        return None
    # float64 is exact for counts below 2**53
    total: torch.Tensor = world.all_reduce(torch.from_numpy(own).double())
    return np.asarray(total.numpy().round(), np.int64)


def _counted(given: Input, piece: MapPiece, classes: int) -> Counts:
    assert given.read_mask is not None
    extents = zip(piece.start, piece.values.shape[1:], strict=True)
    box = tuple(number for first, n in extents for number in (first, first + n))
    mask = given.read_mask(box)
    known = mask != UNLABELLED
    truth = mask[known].astype(np.int64)
    if truth.size and int(truth.max()) >= classes:
        raise ValueError(
            f"the mask has a pixel of class {int(truth.max())}, but the network has {classes} "
            "classes"
        )
    predicted = piece.values.argmax(0).numpy()[known]
    cells = np.bincount(truth * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes)
