from __future__ import annotations

import nibabel
import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.importing.volume_file import open_volume
from spatialdl.predicting.nifti import nifti_header, save_nifti
from spatialdl.predicting.pieces import MapPiece
from spatialdl.predicting.volume_inputs import shard_volume
from tests.predicting.volumes import AFFINE, save, voxels

SIZE = (5, 7, 6)
VALUES = np.random.default_rng(0).random(SIZE)
CUTS = {
    "whole": [(0, 5, 0, 7, 0, 6)],
    "slices": [(0, 2, 0, 7, 0, 6), (2, 5, 0, 7, 0, 6)],
    "rows": [(0, 5, 0, 3, 0, 6), (0, 5, 3, 7, 0, 6)],
    "columns": [(0, 5, 0, 7, 0, 1), (0, 5, 0, 7, 1, 6)],
    "all": [(0, 2, 0, 7, 0, 6), (2, 5, 0, 3, 0, 2), (2, 5, 0, 3, 2, 6), (2, 5, 3, 7, 0, 6)],
}


def pieces(cut: str) -> list[MapPiece]:
    found = []
    for box in CUTS[cut]:
        part = VALUES[tuple(slice(*box[k : k + 2]) for k in (0, 2, 4))]
        found.append(MapPiece(box[::2], torch.from_numpy(part.copy())[None]))
    return found


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_become_a_file_that_lies_as_its_source(cut, ending, tmp_path):
    source = save(tmp_path / f"source.{ending}", voxels(SIZE[::-1]))
    stored, dtype = open_volume(source), np.dtype(np.float64)
    header = nifti_header(stored, source, dtype)
    path = tmp_path / f"a.{ending}"
    save_nifti(path, SingleProcess(), header, SIZE, pieces(cut), dtype)
    found, before = nibabel.load(path), nibabel.load(source)
    assert (np.asarray(found.dataobj) == VALUES.T).all()
    assert (found.affine == before.affine).all()
    assert found.header.get_zooms() == before.header.get_zooms()
    assert found.header.get_xyzt_units()[0] == before.header.get_xyzt_units()[0]
    for code in ("qform_code", "sform_code"):
        assert found.header[code] == before.header[code]
    assert {one.name for one in tmp_path.iterdir()} == {source.name, path.name}


@pytest.mark.parametrize("spacing", [None, (2.5, 0.8, 0.7)])
@pytest.mark.parametrize("affine", [None, AFFINE[:3, [2, 1, 0, 3]]])
def test_a_sample_of_shards_becomes_a_file_that_lies_as_it_says(spacing, affine, tmp_path):
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        writer.add(np.zeros(SIZE, np.int16), spacing=spacing, affine=affine)
    stored = shard_volume(ShardDataset(tmp_path / "set"), 0)
    header = nifti_header(stored, None, np.dtype(np.uint8))
    save_nifti(
        tmp_path / "a.nii", SingleProcess(), header, SIZE, pieces("whole"), np.dtype(np.uint8)
    )
    found = nibabel.load(tmp_path / "a.nii")
    assert (np.asarray(found.dataobj) == 0).all()
    assert found.shape == SIZE[::-1]
    if affine is not None:
        np.testing.assert_allclose(found.affine, AFFINE, rtol=1e-6)
        np.testing.assert_allclose(found.get_qform(), AFFINE, atol=0.05)  # which has no shear
    elif spacing is not None:
        np.testing.assert_allclose(found.header.get_zooms(), spacing[::-1], rtol=1e-6)
        assert found.header["sform_code"] == found.header["qform_code"] == 0


def test_contrasts_scales_and_windows_of_the_source_are_not_taken_over(tmp_path):
    image = nibabel.Nifti1Image(voxels((6, 7, 5, 2)), AFFINE)
    image.header.set_slope_inter(0.5, 3)
    image.header["cal_max"] = 400
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, tmp_path / "source.nii")
    stored, dtype = open_volume(tmp_path / "source.nii"), np.dtype(np.float32)
    header = nifti_header(stored, tmp_path / "source.nii", dtype)
    save_nifti(tmp_path / "a.nii", SingleProcess(), header, SIZE, pieces("whole"), dtype)
    found = nibabel.load(tmp_path / "a.nii")
    assert (np.asarray(found.dataobj) == VALUES.T.astype(np.float32)).all()
    assert found.header["cal_max"] == 0
    assert found.header.get_xyzt_units() == ("mm", "unknown")


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(ending, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spatialdl.predicting.nifti.os.pwrite", full)
    monkeypatch.setattr("spatialdl.predicting.nifti.gzip.GzipFile.write", full)
    with pytest.raises(OSError, match="No space left"):
        save_nifti(
            *(tmp_path / f"a.{ending}", SingleProcess(), b"head", SIZE, pieces("rows")),
            np.dtype(np.uint8),
        )
    assert list(tmp_path.iterdir()) == []
