"""The command with --whole: maps of whole regions, resuming, and errors."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from spatialdl.inference.features.maps import writing
from spatialdl.slides.reading.reader import Slide
from tests.inference.features.maps.networks import Convolved
from tests.inference.features.test_features_cli import EXACT, run

NETWORK = "tests.inference.features.maps.networks.Convolved"
WHOLE = ["--whole", "--encoder", NETWORK, "--device", "cpu"]


def map_of(out: Path, name: str) -> tuple[np.ndarray, dict[str, object]]:
    with h5py.File(out / "maps" / f"{name}.h5") as file:
        return file["features"][:], dict(file["features"].attrs)


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Pictures are drawn where `done` is made only, as that takes long."""
    request.getfixturevalue("done")
    monkeypatch.setattr(writing, "save_picture", lambda path, *_: path.touch())


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "out"
    assert run(small, "--out", out, "--mpp", 2, *WHOLE, *EXACT) == 0
    return out


def test_a_map_is_that_of_the_region_in_one_piece(small, done):
    network = Convolved().eval().double()
    mean, std = (
        torch.tensor(one, dtype=torch.float64).view(3, 1, 1)
        for one in (Convolved.mean, Convolved.std)
    )
    for name in "abc":
        found, said = map_of(done, name)
        rows, columns = said["region"]
        assert (rows % 4, columns % 4) == (0, 0)
        assert found.shape == (10, rows // 4, columns // 4)
        with Slide(small / f"{name}.tiff") as slide:
            pixels = slide.read_box(
                *(said["level0_x"], said["level0_y"], (rows, columns), 4.0),
                (0, rows, 0, columns),
            )
            assert (said["level0_height"], said["level0_width"]) == slide.size
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).double() / 255
        with torch.no_grad():
            wanted = network(((image - mean) / std)[None])[0]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-10)
        x, y = said["level0_x"], said["level0_y"]
        np.testing.assert_array_equal(said["affine"], [[16, 0, x], [0, 16, y]])
        assert (said["mpp"], said["scale"], said["stride"].tolist()) == (2, 4, [4, 4])


def test_manifest_table_and_pictures_are_there(done):
    manifest = json.loads((done / "manifest.json").read_text())
    assert manifest["settings"]["tiling"]["whole"] is True
    slide = manifest["slides"][0]
    assert (slide["file"], slide["picture"]) == ("maps/a.h5", "maps/a.png")
    assert "tiles" not in slide
    with (done / "process_list.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["processed"] * 3
    with Image.open(done / "maps" / "a.png") as picture:
        assert min(picture.size) > 300
    assert not list(done.glob("**/.*.tmp"))


def test_parts_in_one_process_give_the_same(small, done, tmp_path):
    words = ["--grid", "3,2", "--limit-gb", 0.0002]
    assert run(small, "--out", tmp_path / "out", "--mpp", 2, *WHOLE, *EXACT, *words) == 0
    for name in "abc":
        found, said = map_of(tmp_path / "out", name)
        wanted, before = map_of(done, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-10)
        assert said["key"] == before["key"]  # parts change nothing, so that others may go on


def test_what_is_done_is_not_done_again(small, done, tmp_path, capsys):
    out = shutil.copytree(done, tmp_path / "out")
    common = [small, "--out", out, "--mpp", 2, *WHOLE, *EXACT]
    before = {path.name: path.stat().st_mtime_ns for path in (out / "maps").iterdir()}
    (out / "maps" / "b.h5").write_bytes(b"damaged")
    (out / "maps" / "c.png").unlink()
    assert run(*common, "--grid", "2,2") == 0
    assert "maps of 10 features of 3 slides, 1 of them by an earlier run" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (out / "maps").iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"a.h5", "a.png"}
    tiles = ["--encoder", "tests.inference.features.tiny.Tiny", "--device", "cpu"]
    assert run(*common[:5], *tiles) == 2
    assert "has features of other settings" in capsys.readouterr().err
    assert run(*common, "--encoder-args", "seed=4") == 2


def test_maps_and_layouts_of_tiles_replace_each_other(small, done, tmp_path, capsys):
    out = shutil.copytree(done, tmp_path / "out")
    tiles = [small, "--out", out, "--mpp", 2, "--encoder", "tests.inference.features.tiny.Tiny"]
    tiles += ["--device", "cpu", "--layout", "clam"]
    maps = [small, "--out", out, "--mpp", 2, *WHOLE]
    assert run(*tiles) == 2
    assert "has features of other settings" in capsys.readouterr().err
    assert run(*tiles, "--overwrite") == 0
    assert list((out / "maps").iterdir()) == []
    slide = json.loads((out / "manifest.json").read_text())["slides"][0]
    assert (slide["file"], slide["tiles"] > 0, "picture" in slide) == ("h5_files/a.h5", True, False)
    assert run(*maps, "--overwrite") == 0
    assert [*(out / "h5_files").iterdir(), *(out / "pt_files").iterdir()] == []
    assert {path.name for path in (out / "maps").glob("a.*")} == {"a.h5", "a.png"}
    assert map_of(out, "a")[0].dtype == np.float16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the resolution of tiles is missing"),
        (["--mpp", 2, "--tile-size", 64, "--overlap", 8], "--tile-size, --overlap is for tiles"),
        (["--mpp", 2, "--jobs", 2], "--jobs is for tiles, but --whole has none"),
        (["--mpp", 2, "--layout", "clam"], "--layout is for tiles, but --whole has none"),
        (["--mpp", 2, "--limit-gb", 1], "--limit-gb 1 needs regions split by a single process"),
        (["--mpp", 2, "--encoder", "tests.inference.features.tiny.Tiny"], "--whole needs a map"),
        (
            ["--mpp", 2, "--encoder", "tests.inference.features.maps.networks.Pooling"],
            "its map has no regular stride",
        ),
    ],
)
def test_mistakes_are_found_before_work_begins(small, tmp_path, capsys, words, said):
    assert run(small, "--out", tmp_path / "out", *WHOLE, *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_parts_are_of_whole_regions_and_sets_are_not(small, tmp_path, capsys):
    common = [small, "--out", tmp_path / "out", "--mpp", 2, *WHOLE[1:]]
    assert run(*common, "--grid", "2,2") == 2
    assert "--grid and --limit-gb need --whole" in capsys.readouterr().err
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "manifest.json").touch()
    assert run(tmp_path / "set", "--out", tmp_path / "out", *WHOLE) == 2
    assert "--whole needs slides" in capsys.readouterr().err
