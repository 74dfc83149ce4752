"""Pixels of an image by true and predicted class, counted where they are predicted."""

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
    """int64 (classes, classes) by true and predicted class; None where there is no mask.

    Pixels without a label count nowhere. Masks that cannot be read, or have a class that is
    unknown, are reported, and there are no counts. All ranks must ask, and get the same.

    Args:
        pieces: this rank's parts of the map of probabilities.
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
            log.warning("%s: pixels are not compared with its mask: %s", given.name, first)
        return None
    # counts below 2**53 are exact
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
            f"the mask has a pixel of class {int(truth.max())}, but the network knows {classes} "
            "classes"
        )
    predicted = piece.values.argmax(0).numpy()[known]
    cells = np.bincount(truth * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes)
