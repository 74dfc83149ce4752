"""The command: features, resuming, and files in the formats of other programs."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch

from spatialdl.comm.launch import mpiexec_command
from spatialdl.data.feature_file import FeatureFile, list_features
from spatialdl.inference.features.features_cli import main
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.tile_cli import main as tile
from tests.comm.programs import ROOT
from tests.comm.programs import run as run_python
from tests.inference.features.tiny import Tiny
from tests.vision import import_path

REAL = ROOT / "shared" / "data" / "slides"
TINY = ["--encoder", "tests.inference.features.tiny.Tiny", "--device", "cpu"]
EXACT = ["--precision", "float64", "--dtype", "float32"]


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


def started(*arguments: object, launcher: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code of the command in a process of its own, and what it says."""
    words = ("-m", "spatialdl.inference.features.features_cli", *map(str, arguments))
    done = run_python(*words, launcher=launcher)
    return done.returncode, done.stdout + done.stderr


def check_same(one: Path, other: Path) -> None:
    """Two folders have the same features, up to float64 summation order."""
    first, second = list_features([one]), list_features([other])
    assert [file.slide for file in first] == [file.slide for file in second]
    for file, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(file.coords(), again.coords())
        np.testing.assert_allclose(file.read(), again.read(), rtol=1e-6, atol=1e-10)
        assert set(file.attributes) == set(again.attributes)


@pytest.fixture(scope="module")
def done(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of all tiles of the small slides."""
    out = tmp_path_factory.mktemp("done") / "out"
    assert run(small, "--out", out, "--mpp", 0.5, *TINY, *EXACT) == 0
    return out


def test_features_are_those_of_each_tile_alone(small, done):
    network = Tiny().eval().double()
    mean, std = (
        torch.tensor(one, dtype=torch.float64).view(3, 1, 1) for one in (Tiny.mean, Tiny.std)
    )
    files = list_features([done])
    assert [file.slide for file in files] == ["a", "b", "c"]
    for file in files:
        with Slide(small / f"{file.slide}.tiff") as slide:
            for (x, y), found in zip(file.coords().tolist(), file.read(), strict=True):
                pixels = torch.from_numpy(slide.read(x, y, (64, 64), 0.5)).permute(2, 0, 1)
                with torch.inference_mode():
                    wanted = network(((pixels.double() / 255 - mean) / std)[None])[0]
                np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-10)


def test_the_manifest_says_how_they_were_made(done):
    found = json.loads((done / "manifest.json").read_text())
    assert found["settings"]["encoder"]["preprocessing"]["mean"] == [0.5, 0.4, 0.3]
    assert found["settings"]["tiling"]["mpp"] == 0.5
    assert [one["status"] for one in found["slides"]] == ["processed"] * 3
    assert [one["tiles"] for one in found["slides"]] == [f.tiles for f in list_features([done])]


def test_a_data_set_of_the_same_tiles_has_the_same_features(small, done, tmp_path):
    words = [small, "--out", tmp_path / "set", "--tile-size", 64, "--mpp", 0.5]
    assert tile([*map(str, words)]) == 0
    assert run(tmp_path / "set", "--out", tmp_path / "out", *TINY, *EXACT) == 0
    first, second = list_features([done]), list_features([tmp_path / "out"])
    for file, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(file.coords(), again.coords())
        np.testing.assert_allclose(file.read(), again.read(), rtol=1e-6, atol=1e-10)
    assert first[0].attributes["patch_size_level0"] == second[0].attributes["patch_size_level0"]
    assert run(tmp_path / "set", "--out", tmp_path / "b", *TINY, "--mpp", 0.5) == 2


def test_what_is_done_is_not_done_again_and_other_settings_are_refused(
    small, done, tmp_path, capsys
):
    out = shutil.copytree(done, tmp_path / "out")
    common = [small, "--out", out, "--mpp", 0.5, *TINY, *EXACT]
    before = {path.name: path.stat().st_mtime_ns for path in (out / "h5").iterdir()}
    (out / "h5" / "b.h5").write_bytes(b"damaged")
    assert run(*common) == 0
    assert "2 of them by an earlier run" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (out / "h5").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"b.h5"}
    assert run(*common, "--overlap", 8) == 2
    assert "tiling.overlap was 0, is 8" in capsys.readouterr().err
    assert run(*common, "--encoder-args", "seed=4") == 2
    assert run(*common, "--overlap", 8, "--overwrite") == 0
    assert FeatureFile.open(out / "h5" / "a.h5").attributes["overlap"] == 8


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_leaves_whole_files_and_is_resumed(
    small, done, tmp_path, capsys, number
):
    out, armed = tmp_path / "out", tmp_path / "armed"
    armed.touch()
    first = max(small.iterdir(), key=lambda path: path.stat().st_size).stem  # which comes first
    batches = -(-FeatureFile.open(done / "h5" / f"{first}.h5").tiles // 8) + 1
    arguments = [f"armed={armed}", f"batches={batches}", f"number={int(number)}"]
    common = [
        *(small, "--out", out, "--mpp", 0.5, "--encoder", "tests.inference.features.tiny.Ending"),
        *("--device", "cpu", *EXACT, "--batch-size", 8, "--encoder-args", *arguments),
    ]
    code, said = started(*common)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], said
    assert not armed.exists()
    left = [FeatureFile.open(path) for path in (out / "h5").glob("[!.]*.h5")]
    assert 0 < len(left) < 3
    assert run(*common) == 0
    assert f"{len(left)} of them by an earlier run" in capsys.readouterr().out
    check_same(done, out)
    names = {".lock", "h5", "manifest.json", "process_list.csv"}
    assert {path.name for path in out.iterdir()} == names
    assert not list((out / "h5").glob(".*"))


@pytest.mark.slow
def test_ranks_agree_on_mistakes(small, done):
    words = [small, "--mpp", 0.5, *TINY, *EXACT, "--out", done, "--mean", "1,1,1"]
    code, said = started(*words, launcher=mpiexec_command(2))
    assert code != 0
    assert said.count("has features of other settings") == 1


def test_ranks_batches_and_readers_give_the_same_files(small, done, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", import_path(ROOT))
    words = [small, "--mpp", 0.5, *TINY, *EXACT, "--out", tmp_path / "jobs", "--jobs", 2]
    assert run(*words, "--batch-size", 5, "--readers", 3) == 0
    check_same(done, tmp_path / "jobs")
    assert capfd.readouterr().out.count("features of each of") == 1


@pytest.mark.slow
def test_ranks_with_other_random_weights_are_refused(small, tmp_path):
    words = [small, "--out", tmp_path / "out", "--mpp", 0.5, *TINY, "--encoder-args", "seed=none"]
    code, said = started(*words, "--jobs", 2)
    assert code != 0
    assert "weights differ between processes" in said


def test_bad_slides_are_reported_and_the_others_done(tmp_path, capsys):
    if not REAL.is_dir():
        pytest.skip(f"no real slides: {REAL} is missing")
    slides = [REAL / "osp-unopenable.tiff", REAL / "CMU-1-Small-Region.svs", REAL / "bad"]
    common = [*slides, "--out", tmp_path, "--mpp", 2, *TINY]
    assert run(*common) == 1
    said = capsys.readouterr()
    for reason in ("the file is empty", "set them with --slide-mpp", "could not be read"):
        assert reason in said.err
    assert "labels" not in said.err
    found = {
        one["slide"]: one for one in json.loads((tmp_path / "manifest.json").read_text())["slides"]
    }
    assert found["all-white"]["status"] == "no tiles"
    assert found["truncated-half"]["status"] == "failed"
    assert found["corrupt-some-tiles"]["status"] == "damaged"
    assert found["CMU-1-Small-Region"]["status"] == "processed"
    assert {file.slide for file in list_features([tmp_path])} == {
        *("CMU-1-Small-Region", "corrupt-some-tiles")
    }
    assert run(*common, "--skip-errors") == 0


def test_features_that_do_not_fit_are_not_stored(small, tmp_path, capsys):
    words = [small, "--out", tmp_path / "out", "--mpp", 0.5, "--device", "cpu"]
    words += ["--encoder", "tests.inference.features.tiny.Large"]
    assert run(*words) == 1
    assert "not finite in float16; use --dtype float32" in capsys.readouterr().err
    assert list((tmp_path / "out" / "h5").iterdir()) == []
    assert run(*words, "--dtype", "float32", "--overwrite") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the resolution of tiles is missing"),
        (["--mpp", 0.5, "--split", "train"], "--split train is for data sets only"),
        (["--mpp", 0.5, "--device", "cuda"], "PyTorch sees no cuda here"),
        (["--mpp", 0.5, "--overlap", 64], "less than a tile"),
        (["--mpp", 0.5, "--mean", "0.5,0.5,0.5", "--std", "1,0,1"], "expected numbers above 0"),
    ],
)
def test_mistakes_are_found_before_work_begins(small, tmp_path, capsys, words, said):
    assert run(small, "--out", tmp_path / "out", *TINY[:2], *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_patterns_and_other_folders(small, tmp_path, capsys):
    words = ["--mpp", 0.5, *TINY]
    assert run(small / "[ab].tiff", "--out", tmp_path / "out", *words) == 0
    assert [file.slide for file in list_features([tmp_path / "out"])] == ["a", "b"]
    assert run(small / "x*.tiff", "--out", tmp_path / "out", *words) == 2
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").touch()
    assert run(small, "--out", tmp_path / "else", *words) == 2
    assert "contains other files than features" in capsys.readouterr().err


# --- files that other programs read

CLAM = ["--mpp", 0.5, *TINY, "--layout", "clam"]


@pytest.fixture(scope="module")
def clam(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clam") / "out"
    assert run(small, "--out", out, *CLAM) == 0
    return out


def test_the_readers_of_clam_find_float32_tensors_and_the_same_rows_with_coordinates(clam):
    for name in "abc":
        with h5py.File(clam / "h5_files" / f"{name}.h5", "r") as file:
            features, coords = file["features"][:], file["coords"][:]
        tensor = torch.load(clam / "pt_files" / f"{name}.pt")  # tensors only, by default
        assert torch.nn.Linear(12, 1)(tensor).shape == (len(tensor), 1)
        assert torch.equal(torch.from_numpy(features), tensor)
        assert (coords.shape, coords.dtype) == ((len(features), 2), np.dtype(np.int64))
    assert [file.slide for file in list_features([clam])] == ["a", "b", "c"]


def test_trident_finds_the_places_and_the_scale_of_tiles(small, tmp_path):
    """Its readers cut a tile of `patch_size` anew from the two powers, and pass the side at
    level 0 to slide encoders as a Python integer."""
    assert run(small, "--out", tmp_path, "--mpp", 0.7, "--overlap", 16, *TINY) == 0
    with h5py.File(tmp_path / "h5" / "a.h5", "r") as file:
        assert set(file) == {"features", "coords"}
        features, coords = torch.from_numpy(file["features"][:]), file["coords"][:]
        said = dict(file["coords"].attrs)
    assert features.float().shape == (len(coords), 12)
    assert features.dtype == torch.float16
    assert (coords.ndim, coords.shape[1], coords.dtype) == (2, 2, np.dtype(np.int64))
    side = round(said["patch_size"] * said["level0_magnification"] / said["target_magnification"])
    assert (said["patch_size"], side, int(said["patch_size_level0"])) == (64, 90, 90)
    assert (int(said["overlap"]), said["patch_level"], said["name"]) == (16, 0, "a")
    assert (said["level0_width"], said["level0_height"]) == (640, 512)
    steps = coords / (48 * 0.7 / 0.5)  # whole ones, to half a pixel of level 0
    assert np.abs(steps - steps.round()).max() <= 0.5 / 67


def test_a_slide_without_its_tensor_is_computed_again(small, clam, tmp_path, capsys):
    out = shutil.copytree(clam, tmp_path / "out")
    lost = out / "pt_files" / "b.pt"
    lost.unlink()
    assert run(small, "--out", out, *CLAM) == 0
    assert "of 3 slides, 2 of them by an earlier run" in capsys.readouterr().out
    assert torch.equal(torch.load(lost), torch.load(clam / "pt_files" / "b.pt"))


def test_a_slide_that_has_no_tissue_any_more_loses_its_files(small, tmp_path):
    slide, out = tmp_path / "a.tiff", tmp_path / "out"
    shutil.copy(small / "a.tiff", slide)
    assert run(slide, "--out", out, *CLAM) == 0
    assert len(list(out.glob("*/a.*"))) == 2
    scanned = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    white = np.full((512, 640, 3), 255, np.uint8)
    tifffile.imwrite(slide, white, tile=(256, 256), photometric="rgb", **scanned)
    assert run(slide, "--out", out, *CLAM) == 1
    assert list(out.glob("*/a.*")) == []
