"""Output files in the formats of other programs, and detection of completed slides."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch

from spatialdl.comm.launch import mpiexec_command
from spatialdl.data.feature_file import list_features
from spatialdl.features.command import main
from tests.features.test_command import ended, started

TINY = ["--mpp", "0.5", "--encoder", "tests.features.tiny.Tiny", "--device", "cpu"]


def run(slides: Path, out: Path, *words: str) -> int:
    return main([str(slides), "--out", str(out), *TINY, *words])


@pytest.fixture(scope="module")
def clam(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clam") / "out"
    assert run(small, out, "--layout", "clam") == 0
    return out


def test_the_training_script_of_clam_finds_a_float32_tensor_of_each_slide(clam):
    """It calls `torch.load` on `pt_files/NAME.pt` and a linear layer on what comes back."""
    for name in "abc":
        features = torch.load(clam / "pt_files" / f"{name}.pt")  # tensors only, by default
        assert type(features) is torch.Tensor
        assert features.is_contiguous()
        assert torch.nn.Linear(12, 1)(features).shape == (len(features), 1)


def test_the_hdf5_reader_of_clam_finds_the_same_rows_with_their_coordinates(clam):
    for name in "abc":
        with h5py.File(clam / "h5_files" / f"{name}.h5", "r") as file:
            features, coords = file["features"][:], file["coords"][:]
        tensor = torch.load(clam / "pt_files" / f"{name}.pt")
        assert torch.equal(torch.from_numpy(features), tensor)
        assert (coords.shape, coords.dtype) == ((len(features), 2), np.dtype(np.int64))
    assert [file.slide for file in list_features([clam])] == ["a", "b", "c"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_trident_finds_the_places_and_the_scale_of_tiles(small, tmp_path, dtype):
    """Its readers cut a tile of `patch_size` anew from the two powers, and pass the side at
    level 0 to slide encoders as a Python integer."""
    assert run(small, tmp_path, "--mpp", "0.7", "--overlap", "16", "--dtype", dtype) == 0
    with h5py.File(tmp_path / "h5" / "a.h5", "r") as file:
        assert set(file) == {"features", "coords"}
        features, coords = torch.from_numpy(file["features"][:]), file["coords"][:]
        said = dict(file["coords"].attrs)
    assert features.float().shape == (len(coords), 12)
    assert features.dtype == getattr(torch, dtype)
    assert (coords.ndim, coords.shape[1], coords.dtype) == (2, 2, np.dtype(np.int64))
    side = round(said["patch_size"] * said["level0_magnification"] / said["target_magnification"])
    assert (said["patch_size"], side, int(said["patch_size_level0"])) == (64, 90, 90)
    assert int(said["overlap"]) == 16
    steps = coords / (48 * 0.7 / 0.5)  # whole ones, to half a pixel of level 0
    assert np.abs(steps - steps.round()).max() <= 0.5 / 67


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "jobs"), [(2, 1), (1, 2)])
def test_ranks_and_processes_write_the_tensors_of_one_process(small, clam, tmp_path, ranks, jobs):
    launcher = tuple(mpiexec_command(ranks)) if ranks > 1 else ()
    words = [small, "--out", tmp_path, *TINY, "--layout", "clam", "--jobs", jobs]
    code, said = ended(started(*words, launcher=launcher))
    assert code == 0, said
    assert {path.parent.name for path in tmp_path.glob("*/*.*")} == {"h5_files", "pt_files"}
    for name in "abc":
        found, wanted = (torch.load(out / "pt_files" / f"{name}.pt") for out in (tmp_path, clam))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_slide_without_its_tensor_is_computed_again(small, clam, tmp_path, capsys):
    assert run(small, tmp_path, "--layout", "clam") == 0
    lost = tmp_path / "pt_files" / "b.pt"
    lost.unlink()
    capsys.readouterr()
    assert run(small, tmp_path, "--layout", "clam") == 0
    assert "of 3 slides, 2 of them by an earlier run" in capsys.readouterr().out
    assert torch.equal(torch.load(lost), torch.load(clam / "pt_files" / "b.pt"))


def test_another_layout_is_refused_or_replaces_the_first(small, tmp_path, capsys):
    assert run(small, tmp_path) == 0
    assert run(small, tmp_path, "--layout", "clam") == 2
    assert "layout was None, is clam" in capsys.readouterr().err
    assert run(small, tmp_path, "--layout", "clam", "--overwrite") == 0
    assert list((tmp_path / "h5").iterdir()) == []
    assert len(list_features([tmp_path])) == 3
    assert run(small, tmp_path, "--overwrite") == 0
    assert list((tmp_path / "pt_files").iterdir()) == list((tmp_path / "h5_files").iterdir()) == []


def test_clam_takes_no_float16(small, tmp_path, capsys):
    assert run(small, tmp_path / "out", "--layout", "clam", "--dtype", "float16") == 2
    assert "CLAM needs features of float32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_slide_that_has_no_tissue_any_more_loses_its_files(small, tmp_path):
    slide, out = tmp_path / "a.tiff", tmp_path / "out"
    shutil.copy(small / "a.tiff", slide)
    assert run(slide, out, "--layout", "clam") == 0
    assert len(list(out.glob("*/a.*"))) == 2
    white = np.full((512, 640, 3), 255, np.uint8)
    tifffile.imwrite(
        slide,
        white,
        tile=(256, 256),
        photometric="rgb",
        resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )
    assert run(slide, out, "--layout", "clam") == 1
    assert list(out.glob("*/a.*")) == []
