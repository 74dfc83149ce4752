from __future__ import annotations

from itertools import permutations, product

import nibabel
import numpy as np
import pytest

from spatialdl.data.samples import VolumeSample
from spatialdl.data.volume_geometry import Geometry, VolumeTurn, orientation_of

CODES = [
    "".join(letters) for axes in permutations(("LR", "PA", "IS")) for letters in product(*axes)
]


def affine_with(code: str) -> np.ndarray:
    """Slightly oblique, of (slice, row, column)."""
    affine = np.array([[0.1, 0.05, 0.02, 3], [0.05, 0.1, 0.03, 4], [0, 0.02, 0.1, 5]])
    for dim, letter in enumerate(code):
        axis = next(k for k, ends in enumerate(("LR", "PA", "IS")) if letter in ends)
        affine[axis, dim] = 2.0 if letter in "RAS" else -2.0
    return affine


def sample(affine, spacing) -> VolumeSample:
    known = {"mpp": None, "striped": False, "bands": (), "label": None, "split": None}
    return VolumeSample(
        *("0", 4, 5), **known, slide="", x=0, y=0, depth=3, spacing=spacing, affine=affine
    )


@pytest.mark.parametrize("code", CODES)
def test_orientations_are_those_of_nibabel(code):
    affine = affine_with(code)
    assert orientation_of(affine) == code
    of_file = np.vstack([affine[:, [2, 1, 0, 3]], [0, 0, 0, 1]])
    assert "".join(nibabel.aff2axcodes(of_file)) == code[::-1]


@pytest.mark.parametrize("stored", CODES[::5])
@pytest.mark.parametrize("seen", CODES[::7])
def test_a_turn_moves_each_voxel_to_where_it_is_seen(stored, seen):
    turn = VolumeTurn.between(stored, seen)
    voxels = np.arange(4 * 5 * 6 * 2).reshape(4, 5, 6, 2)
    turned = turn.seen(voxels)
    assert turned.shape[:3] == turn.seen_size((4, 5, 6))
    assert (turn.stored(turned[..., 1]) == voxels[..., 1]).all()
    # the voxel at the end of a dim lies at the end that its letter names
    for number, letter in enumerate(seen):
        axis = next(ends for ends in ("LR", "PA", "IS") if letter in ends)
        dim = next(k for k, other in enumerate(stored) if other in axis)
        first = voxels.take(0 if stored[dim] != letter else -1, dim)
        assert set(first.ravel()) == set(turned.take(-1, number).ravel())
    box = tuple(n for size in turned.shape[:3] for n in (1, size - 1))
    box = (0, *box[1:])  # not the same from both ends
    spans = [slice(*box[k : k + 2]) for k in (0, 2, 4)]
    at = turn.stored_box(box, turned.shape[:3])
    under = voxels[tuple(slice(*at[k : k + 2]) for k in (0, 2, 4))]
    assert (turn.seen(under) == turned[tuple(spans)]).all()


def test_a_training_set_has_an_orientation_if_all_of_its_volumes_have_it():
    one, other = affine_with("SAR"), affine_with("SPL")
    alike = Geometry.of([sample(one, (2, 1, 1)), sample(one, (3, 1, 0.5))])
    assert alike == Geometry("SAR", ((2, 1, 0.5), (3, 1, 1)))
    assert Geometry.parsed(alike.described()) == alike
    assert Geometry.of([sample(one, None), sample(other, (1, 1, 1))]) == Geometry()
    assert Geometry.of([sample(None, (1, 1, 1))]) == Geometry(None, ((1, 1, 1), (1, 1, 1)))
    assert Geometry.of([]) == Geometry() == Geometry.parsed(Geometry().described())
    assert alike.turn(other) == VolumeTurn.between("SPL", "SAR")
    assert alike.turn(None) == Geometry().turn(one) == VolumeTurn()


@pytest.mark.parametrize(
    "row",
    [
        {"orientation": "RAX", "spacing": None},
        {"orientation": "RLS", "spacing": None},
        {"orientation": 3, "spacing": None},
        {"orientation": None, "spacing": [[1, 1, 1]]},
        {"orientation": None, "spacing": [[1, 1, 1], [1, 1, 0]]},
        {"spacing": None},
    ],
)
def test_what_no_checkpoint_of_ours_says_is_refused(row):
    with pytest.raises((ValueError, KeyError)):
        Geometry.parsed(row)


def test_other_spacings_are_remarked():
    trained = Geometry(None, ((2.0, 1.0, 1.0), (2.0, 1.0, 1.0)))
    assert trained.remark((2.1, 1.0, 0.95)) == Geometry().remark(None) == ""
    said = trained.remark((5.0, 1.0, 1.0))
    assert "5 x 1 x 1 mm" in said
    assert "training set has 2 x 1 x 1 mm" in said
    assert "is unknown" in trained.remark(None)
    wide = Geometry(None, ((2.0, 1.0, 1.0), (4.0, 1.0, 1.0)))
    assert wide.remark((3.0, 1.0, 1.0)) == ""
    assert "2 x 1 x 1 to 4 x 1 x 1 mm" in wide.remark((9.0, 1.0, 1.0))
