"""The maps of a volume, written as NIfTI files that lie in the patient as the volume does.

NAME-classes.nii   the class of every voxel that is the most probable
NAME-CLASS.nii     the probability of a class
NAME-slices.png    three orthogonal slices through the middle, and the classes over them

They are compressed, NAME-classes.nii.gz, where the volume is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.data.image_source import Box, pairs, whole_box
from spatialdl.data.importing.volume_file import StoredVolume
from spatialdl.data.saving import replacing
from spatialdl.data.volume_geometry import Geometry, Turn
from spatialdl.predicting.inputs import Input
from spatialdl.predicting.nifti import nifti_header, save_nifti
from spatialdl.predicting.pieces import Piece
from spatialdl.predicting.results import class_files
from spatialdl.predicting.running import Outcome
from spatialdl.predicting.trained import Trained
from spatialdl.predicting.volume_inputs import VolumeImages
from spatialdl.slides.batch.finding_slides import storable
from spatialdl.text import fitted
from spatialdl.training.pictures.orthogonal_slices import (
    Picture,
    Planes,
    draw_planes,
    joined_planes,
    plane_patches,
    turned,
)
from spatialdl.training.pictures.thumbnails import COLOURS

_DRAWN = Geometry("IPL")  # the head above, the front of the patient above or left, the right left
_SIDE = 420  # pixels of the longest edge of a volume
_LEGEND = 12  # classes that it names at most


class VolumeMaps:
    """Writes the maps of one volume; all ranks make it and call it together.

    Args:
        shown: the classes whose probabilities are wanted.
    """

    def __init__(
        self,
        run_dir: Path,
        given: Input,
        trained: Trained,
        shown: Sequence[int],
        world: Communicator,
    ) -> None:
        assert isinstance(given.source, VolumeImages)
        self._run_dir, self._given, self._source = run_dir, given, given.source
        self._trained, self._shown, self._world = trained, shown, world
        self._files: list[str] = []

    def save(self, outcome: Outcome) -> list[str]:
        """Write all that there is to write.

        Returns:
            The names of the files.
        """
        pieces = [self._as_stored(piece) for piece in outcome.pieces]
        classes = [Piece(one.start, one.values.argmax(0, keepdim=True)) for one in pieces]
        *names, name = class_files([*self._trained.classes, "classes"])
        self._save(name, classes, np.dtype(np.uint8 if len(names) <= 256 else np.uint16))
        double = self._world.allgather(any(one.values.dtype == torch.float64 for one in pieces))
        kind = np.dtype(np.float64 if any(double) else np.float32)
        for number in self._shown:
            own = [Piece(one.start, one.values[number : number + 1]) for one in pieces]
            self._save(names[number], own, kind)
        self._save_picture(classes)
        return self._files

    def _as_stored(self, piece: Piece) -> Piece:
        """A piece in the dims of the file."""
        turn = self._source.turn
        if turn == Turn():
            return piece
        box = whole_box(piece.values.shape[1:])
        spans = zip(pairs(box), piece.start, strict=True)
        seen = tuple(number + first for span, first in spans for number in span)
        stored = turn.stored_box(seen, self._given.size)
        values = np.stack([turn.stored(one.numpy()) for one in piece.values])
        return Piece(tuple(stored[::2]), torch.from_numpy(values))

    def _save(self, ending: str, pieces: Sequence[Piece], dtype: np.dtype[Any]) -> None:
        stored, path = self._source.stored, self._given.slide
        compressed = path is not None and path.name.lower().endswith(".gz")
        name = self._named(f"-{ending}.nii{'.gz' * compressed}")
        header = nifti_header(stored, path, dtype) if self._world.rank == 0 else b""
        save_nifti(self._run_dir / name, self._world, header, stored.size, pieces, dtype)

    def _named(self, ending: str) -> str:
        # a data set may call its volumes whatever it likes
        self._files.append(f"{storable(self._given.name)}{ending}")
        return self._files[-1]

    def _save_picture(self, classes: Sequence[Piece]) -> None:
        stored = self._source.stored
        own = [plane_patches(one.values[0].numpy(), _box(one), stored.size) for one in classes]
        everybody = self._world.gather(own)
        name = self._named("-slices.png")
        if everybody is None:
            return
        found = joined_planes([planes for one in everybody for planes in one], stored.size)
        turn = _DRAWN.turn(stored.affine)
        planes, over = turned(_planes_of(stored), turn), turned(found, turn)
        spacing = None if stored.spacing is None else turn.seen_size(stored.spacing)
        drawn = [draw_planes(planes, spacing, one, side=_SIDE) for one in (None, over)]
        _save_figure(self._run_dir / name, self._given.name, drawn, self._trained.classes)


def _box(piece: Piece) -> Box:
    spans = zip(piece.start, piece.values.shape[1:], strict=True)
    return tuple(number for first, n in spans for number in (first, first + n))


def _planes_of(stored: StoredVolume) -> Planes:
    """The slices through the middle, of the first channel; the volume is not read whole."""
    found = []
    for dim, n in enumerate(stored.size):
        spans = pairs(whole_box(stored.size))
        spans[dim] = (n // 2, n // 2 + 1)
        voxels = stored.read(tuple(number for span in spans for number in span))
        found.append(voxels[..., 0].take(0, dim))
    return Planes(*found)


def _save_figure(path: Path, title: str, pictures: Sequence[Picture], names: Sequence[str]) -> None:
    """The slices, beside or below them the same with classes, and the colours of these."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, cols = pictures[0].shape[:2]
    down, across = (1, 2) if 2 * rows > cols else (2, 1)
    inches = 7.0 * across, 7.0 * down * rows / cols + 1
    figure = Figure(figsize=inches, dpi=130, layout="constrained")
    for panel, picture in zip(figure.subplots(down, across), pictures, strict=True):
        panel.imshow(picture, interpolation="nearest")
        panel.set_axis_off()
    marks = [
        Patch(color=COLOURS[(number - 1) % len(COLOURS)] / 255, label=fitted(name, 30))
        for number, name in enumerate(names)
        if number > 0
    ][:_LEGEND]
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=min(6, len(marks)))
    figure.suptitle(fitted(title, 60), fontsize=11)
    with replacing(path) as out:
        figure.savefig(out, format="png")
