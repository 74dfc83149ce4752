from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import openslide
import pytest
import tifffile

from spatialdl.data import ShardDataset
from spatialdl.slides.command import main

TILES = ["--tile-size", "256", "--mpp", "0.5"]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("slide,label,split\nring,Ring,train\nstrand.tiff,Strand,val\n")
    return path


def test_slides_become_a_data_set(
    tmp_path: Path,
    synthetic: dict[str, Path],
    labels: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "set"
    slides = synthetic["ring"].parent
    assert run(slides, "--out", out, "--tile-size", 128, "--mpp", 1, "--labels", labels) == 0
    data = ShardDataset(out)
    data.verify()
    assert data.classes == ["Ring", "Strand"]
    assert (data.splits, data.mpp, data.image_size(0)) == (["train", "val"], 1.0, (128, 128))
    for number, (image, label) in enumerate(data):
        sample = data.sample(number)
        assert (sample.slide, sample.split) == [("ring", "train"), ("strand", "val")][label]
        if number % 5 == 0:
            with openslide.OpenSlide(synthetic[sample.slide]) as slide:
                region = slide.read_region((sample.x, sample.y), 1, (128, 128))
            assert (image == np.asarray(region.convert("RGB"))).all()
    places = [[data.sample(number).x, data.sample(number).y] for number in range(len(data))]
    data.close()  # HDF5 opens a file once in a process with one kind of locking
    stored = []
    for shard in sorted(out.glob("shard-*.h5")):
        with h5py.File(shard) as file:
            stored += file["coords"][:].tolist()
    assert stored == places
    assert sorted(path.name for path in (out / "pictures").iterdir()) == [
        *("ring.png", "ring.stitched.jpg"),
        *("strand.png", "strand.stitched.jpg"),
    ]
    with (out / "process_list.csv").open(newline="") as file:
        written = [int(row["written"]) for row in csv.DictReader(file)]
    assert sum(written) == len(data)
    assert f"wrote {len(data)} tiles of 2 slides" in capsys.readouterr().out


def test_without_labels_there_are_none(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    assert run(synthetic["ring"], "--out", tmp_path / "set", *TILES) == 0
    data = ShardDataset(tmp_path / "set")
    assert (data.classes, data.splits) == ([], [])
    assert set(data.labels.tolist()) == {-1}


@pytest.mark.parametrize("how", [TILES, ["--whole", "--mpp", "0.5", "--stripes", "2"]])
def test_codecs_without_loss(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    made = []
    for codec in ("raw", "zstd", "lz4"):
        out = tmp_path / codec
        more = ["--codec", codec, "--stripe-count", "2"]
        assert run(synthetic["ring"], "--out", out, *how, *more) == 0
        made.append(ShardDataset(out))
        assert made[-1].codec == codec
        assert "remark: stripes were not set" in capsys.readouterr().err
        assert all((made[-1].read(k) == made[0].read(k)).all() for k in range(len(made[0])))
    sizes = [sum(path.stat().st_size for path in data.path.glob("*.h5")) for data in made]
    assert sizes[1] < sizes[0]
    assert sizes[2] < sizes[0]


def test_shards_are_as_large_as_asked(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    assert run(synthetic["ring"], "--out", tmp_path / "set", *TILES, "--shard-size", "1M") == 0
    tiles = len(ShardDataset(tmp_path / "set"))
    assert len(list((tmp_path / "set").glob("shard-*.h5"))) == -(-tiles // 5)


def test_a_data_set_is_not_replaced_by_accident(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert run(synthetic["ring"], "--out", out, *TILES) == 0
    before = (out / "manifest.json").read_text()
    assert run(synthetic["strand"], "--out", out, *TILES, "--min-tissue", 0.4) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "manifest.json").read_text() == before
    # nothing to replace it with: the old one stays
    assert run(synthetic["strand"], "--out", out, *TILES, "--overwrite", "--min-tissue", 1) == 1
    assert (out / "manifest.json").read_text() == before
    assert run(synthetic["strand"], "--out", out, *TILES, "--overwrite") == 0
    assert ShardDataset(out).sample(0).slide == "strand"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slide,label\nring,a\n", "no column split"),
        ("slide,label,split\nring,a,train\nstrand,b,val\nother,b,val\n", "names other"),
        ("slide,label,split\nring,a,train\n", "no line for strand.tiff"),
    ],
)
def test_mistakes_in_the_labels_write_nothing(
    tmp_path: Path,
    synthetic: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    text: str,
    says: str,
) -> None:
    (tmp_path / "labels.csv").write_text(text)
    code = run(
        *synthetic.values(), "--out", tmp_path / "set", *TILES, "--labels", tmp_path / "labels.csv"
    )
    assert code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


@pytest.mark.parametrize(
    "more",
    [
        ["--tile-size", "0"],
        ["--tile-size", "2.5"],
        ["--mpp", "0"],
        ["--mpp", "353"],
        ["--min-tissue", "1.5"],
        ["--min-tissue", "nan"],
        ["--slide-mpp", "x"],
        ["--shard-size", "0"],
        ["--shard-size", "lots"],
        ["--stripe-count", "0"],
        ["--stripe-count", "all"],
        ["--stripe-size", "65K"],
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, "--out", tmp_path / "set", *TILES, *more)
    assert caught.value.code == 2
    assert f"argument {more[0]}: '{more[1]}' is not" in capsys.readouterr().err


def test_slides_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.svs", "--out", tmp_path / "set", *TILES) == 2
    assert "none.svs: there is no such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--out", tmp_path / "set", *TILES) == 2
    assert "has no slides in it" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_a_batch_goes_on_after_bad_slides(
    tmp_path: Path, real: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    given = [real / "CMU-1-Small-Region.svs", real / "osp-unreadable.svs", real / "bad"]
    assert run(*given, "--out", out, *TILES) == 1
    text = capsys.readouterr()
    status = {line.split()[0]: line.split()[-1] for line in text.out.splitlines()[1:-1]}
    assert status == {
        **{"CMU-1-Small-Region": "processed", "osp-unreadable": "tiles", "all-white": "tiles"},
        **{"corrupt-some-tiles": "damaged", "empty": "failed", "no-mpp": "failed"},
        **{"truncated-half": "failed"},
    }
    assert text.out.splitlines()[-1].startswith("wrote ")
    for says in ("empty.svs: the file is empty", "no-mpp.svs has no micrometres", "cut short"):
        assert says in text.err
    assert "all-white has no tiles: no tissue" in text.err
    assert "Traceback" not in text.err
    with (out / "process_list.csv").open(newline="") as file:
        for row in csv.DictReader(file):  # glass that the thumbnail could not show is no tissue
            assert int(row["with_tissue"]) == int(row["unreadable"]) + int(row["written"])
    assert run(*given[:2], "--out", out, *TILES, "--overwrite") == 0
    assert run(given[0], real / "bad/empty.svs", "--out", out, *TILES, "--overwrite") == 1
    assert (
        run(given[0], real / "bad/empty.svs", "--out", out, *TILES, "--overwrite", "--skip-errors")
        == 0
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad/all-white.svs", "no tissue: none of 1 slides has a tile"),
        ("bad/empty.svs", "none of 1 slides could be read"),
        ("osp-unreadable.svs", "no tissue"),
    ],
)
def test_no_tile_at_all_is_an_error_and_leaves_reports_only(
    tmp_path: Path, real: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    assert run(real / name, "--out", tmp_path / "set", *TILES, "--skip-errors") == 1
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    inside = {path.name for path in (tmp_path / "set").iterdir()}
    assert inside - {"pictures", "records"} == {"process_list.csv", "report.html", "settings.json"}
    # which are in nobody's way
    slide = real / "CMU-1-Small-Region.svs"
    assert run(slide, "--out", tmp_path / "set", *TILES, "--min-tissue", 0.4) == 0


def test_a_resolution_may_be_given(tmp_path: Path, real: Path) -> None:
    slide = real / "bad" / "no-mpp.svs"
    assert run(slide, "--out", tmp_path / "set", *TILES, "--slide-mpp", 0.499) == 0
    assert len(ShardDataset(tmp_path / "set")) == 33


def test_exactly_one_resolution_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [tmp_path, "--out", tmp_path / "set", "--tile-size", 256]
    for more, says in [
        ([], "one of the arguments --mpp --mag --level is required"),
        (["--mpp", 0.5, "--mag", 20], "not allowed with"),
        (["--mag", 20, "--level", 0], "not allowed with"),
        (["--mag", 0], "'0' is not the power of an objective"),
        (["--level", -1], "'-1' is not a level"),
    ]:
        with pytest.raises(SystemExit) as caught:
            run(*common, *more)
        assert caught.value.code == 2
        assert says in capsys.readouterr().err


def test_magnification_and_level(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    sets = []
    for name, *wanted in [("a", "--mpp", 1.0), ("b", "--mag", 10), ("c", "--level", 1)]:
        assert run(synthetic["ring"], "--out", tmp_path / name, "--tile-size", 128, *wanted) == 0
        sets.append(ShardDataset(tmp_path / name))
    assert [data.mpp for data in sets] == [1.0, None, None]
    tiles = [np.stack([np.asarray(image) for image, _ in data]) for data in sets]
    assert (tiles[0] == tiles[1]).all()
    assert (tiles[0] == tiles[2]).all()


def test_a_level_needs_no_resolution(tmp_path: Path, real: Path) -> None:
    slide, out = real / "bad" / "no-mpp.svs", tmp_path / "set"
    assert run(slide, "--out", out, "--tile-size", 256, "--level", 0) == 0
    assert len(ShardDataset(out)) == 33
    with (out / "process_list.csv").open(newline="") as file:
        assert [row["mpp"] for row in csv.DictReader(file)] == [""]
    assert run(slide, "--out", out, "--tile-size", 256, "--level", 1, "--overwrite") == 1


def test_the_labels_may_say_resolutions(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels, out = tmp_path / "labels.csv", tmp_path / "set"
    labels.write_text("slide,label,split,mpp\nring,a,train,0.25\nstrand,b,val,\n")
    common = [*synthetic.values(), "--out", out, "--labels", labels, "--tile-size", 128]
    assert run(*common, "--mpp", 1, "--slide-mpp", 0.5) == 0
    with (out / "process_list.csv").open(newline="") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    assert (rows["ring"]["mpp"], rows["strand"]["mpp"]) == ("0.25", "0.5")
    assert int(rows["ring"]["in_grid"]) < int(rows["strand"]["in_grid"])
    labels.write_text("slide,label,split,mpp\nring,a,train,353\nstrand,b,val,\n")
    assert run(*common, "--mpp", 1, "--overwrite") == 2
    assert "line 2: mpp is '353', expected" in capsys.readouterr().err


def test_pixels_that_are_not_square_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = np.full((600, 600, 3), (200, 60, 160), np.uint8)
    per_cm = (1e4 / 0.5, 1e4 / 0.51)
    tifffile.imwrite(
        tmp_path / "a.tiff", image, tile=(256, 256), resolution=per_cm, resolutionunit="CENTIMETER"
    )
    assert run(tmp_path / "a.tiff", "--out", tmp_path / "set", *TILES, "--min-tissue", 0) == 0
    assert (
        "a: pixels are not square: 0.5 micrometres horizontally, 0.51 vertically"
        in capsys.readouterr().err
    )


def test_one_name_for_two_formats_keeps_the_suffix(
    tmp_path: Path, synthetic: dict[str, Path]
) -> None:
    shutil.copy(synthetic["ring"], tmp_path / "a.tif")
    shutil.copy(synthetic["strand"], tmp_path / "a.tiff")
    assert run(tmp_path, "--out", tmp_path / "set", *TILES) == 0
    data = ShardDataset(tmp_path / "set")
    assert {data.sample(k).slide for k in range(len(data))} == {"a.tif", "a.tiff"}


def test_the_script_is_the_command(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "tools" / "tile_slides.py"
    command = [sys.executable, script, tmp_path / "none", "--out", tmp_path / "set", *TILES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot find slide")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("codec", ["raw", "jpeg-native"])
def test_annotations_become_the_masks_of_whole_regions(
    tmp_path: Path, synthetic: dict[str, Path], labels: Path, codec: str
) -> None:
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    corners = [[300, 320], [900, 320], [900, 1000], [300, 1000], [300, 320]]
    tumour = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {"classification": {"name": "Tumour"}},
    }
    for name, features in (("ring", [tumour]), ("strand", [])):
        text = json.dumps({"type": "FeatureCollection", "features": features})
        (drawn / f"{name}.geojson").write_text(text)
    out, slides = tmp_path / "set", synthetic["ring"].parent
    labels.write_text("slide,label,split\nring,,train\nstrand.tiff,Strand,val\n")
    given = ("--whole", "--level", 0, "--stripes", 2, "--codec", codec)
    assert run(slides, "--out", out, *given, "--annotations", drawn, "--labels", labels) == 0
    data = ShardDataset(out)
    data.verify()
    assert data.has_masks
    assert data.classes == ["background", "Tumour"]
    assert data.splits == ["train", "val"]
    assert data.labels.tolist() == [-1, -1]
    for number in range(2):
        sample = data.sample(number)
        mask = data.read_mask(number)
        assert mask.shape == data.image_size(number) == data.read(number).shape[:2]
        expected = np.zeros(mask.shape, np.uint8)
        if sample.slide == "ring":
            rows = slice(max(0, 320 - sample.y), 1000 - sample.y)
            expected[rows, max(0, 300 - sample.x) : 900 - sample.x] = 1
            assert expected.any()
        assert np.array_equal(mask, expected)
    without = tmp_path / "without"
    (drawn / "strand.geojson").unlink()
    assert run(slides, "--out", without, *given, "--annotations", drawn) == 1
    assert len(ShardDataset(without)) == 1


def test_slides_without_a_label_are_left_out(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label,split\nring,Ring,train\n")
    words = [*synthetic.values(), "--out", tmp_path / "set", *TILES, "--unlabelled", "skip"]
    assert run(*words, "--labels", labels, "--dry-run") == 0
    assert "remark: skipped 1 slide without a label: strand.tiff" in capsys.readouterr().err
    assert run(*words, "--dry-run") == 2
    assert "--unlabelled skip requires --labels" in capsys.readouterr().err
    labels.write_text("slide,label,split\n")
    assert run(*words, "--labels", labels, "--dry-run") == 2
    assert "has no line for any of the slides" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["inspect"], ["--dry-run", "--out", "set", *TILES]])
def test_a_reader_that_closes_the_pipe_is_no_error(
    tmp_path: Path, synthetic: dict[str, Path], words: list[str]
) -> None:
    slide = str(synthetic["ring"])
    process = subprocess.Popen(
        [sys.executable, "-m", "spatialdl.slides.command", *words, slide],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.parametrize("edge", ["pad", "shift"])
def test_tiles_at_the_edges_are_in_the_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edge: str
) -> None:
    image = np.full((300, 310, 3), 245, np.uint8)
    image[100:, 100:] = (200, 90, 150)
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    given = (tmp_path / "a.tiff", "--tile-size", 128, "--level", 0, "--min-tissue", 0.1)
    assert run(*given, "--out", tmp_path / "drop") == 0
    said = capsys.readouterr()
    assert "42% of its tissue is in no tile: " in said.err
    assert said.out.splitlines()[0].split() == [
        *("slide", "grid", "tissue", "outside,", "%", "unreadable", "written")
    ]
    out = tmp_path / "set"
    assert run(*given, "--edge", edge, "--out", out) == 0
    assert capsys.readouterr().err == ""
    data, dropped = ShardDataset(out), ShardDataset(tmp_path / "drop")
    assert data.manifest.made_with["edge"] == edge
    places = [(data.sample(k).x, data.sample(k).y) for k in range(len(data))]
    assert set(places) > {(dropped.sample(k).x, dropped.sample(k).y) for k in range(len(dropped))}
    padded = np.full((400, 400, 3), 255, np.uint8)
    padded[:300, :310] = image
    for number, (x, y) in enumerate(places):
        assert (data.read(number) == padded[y : y + 128, x : x + 128]).all()
    assert places[-1] == {"pad": (256, 256), "shift": (182, 172)}[edge]
    # other edges are other tiles: not into the same folder
    assert run(*given, "--out", out) == 2
    assert "already contains a data set" in capsys.readouterr().err
    assert run(*given, "--edge", edge, "--out", out) == 0
    assert "nothing to do" in capsys.readouterr().out
