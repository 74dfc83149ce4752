from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from spatialdl.data import ShardDataset
from spatialdl.slides.batch import choosing
from spatialdl.slides.batch.choosing import add_options
from spatialdl.slides.command import main
from spatialdl.slides.cutting.normalise import own_colours
from spatialdl.slides.pyramid import write_pyramid
from spatialdl.slides.reading.reader import Slide

TILES = ["--tile-size", "256", "--mpp", "0.5"]


def run(out: Path, *arguments: object) -> int:
    return main([str(argument) for argument in (*arguments, "--out", out, "--overwrite", *TILES)])


def rows(out: Path) -> dict[str, dict[str, str]]:
    with (out / "process_list.csv").open(newline="") as file:
        return {row["slide"]: row for row in csv.DictReader(file)}


def polygon(x0: int, y0: int, x1: int, y1: int, name: str | None) -> dict[str, object]:
    ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
    properties = {"classification": {"name": name}} if name else {}
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def annotate(folder: Path, name: str, *features: object) -> None:
    folder.mkdir(exist_ok=True)
    content = {"type": "FeatureCollection", "features": features}
    (folder / f"{name}.geojson").write_text(json.dumps(content))


@pytest.fixture
def everywhere(tmp_path: Path) -> Path:
    """Masks by which all of the ring is tissue."""
    (tmp_path / "masks").mkdir()
    Image.new("L", (23, 16), 255).save(tmp_path / "masks" / "ring.png")
    return tmp_path / "masks"


def test_without_options_nothing_is_asked() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert vars(parser.parse_args([])) == {
        **{
            "background": "auto",
            "mask_dir": None,
            "annotations": None,
            "overlap": 0,
            "edge": "drop",
        },
        **{"filter": {}, "stain_normalise": None, "stain_reference": None},
    }


def test_masks_say_where_tiles_are(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    mask = np.zeros((160, 230), np.uint8)
    mask[:52, :77] = 255
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks" / "ring.png")
    out = tmp_path / "set"
    # strand has no mask: the row says so, the batch goes on
    assert run(out, synthetic["ring"].parent, "--mask-dir", tmp_path / "masks") == 1
    assert "strand.tiff has no mask: there is no strand.png in" in capsys.readouterr().err
    assert rows(out)["strand"]["status"] == "failed"
    data = ShardDataset(out)
    places = {(data.sample(k).x, data.sample(k).y) for k in range(len(data))}
    assert places == {(256 * i, 256 * j) for i in range(3) for j in range(2)}
    Image.fromarray(mask * 0).save(tmp_path / "masks" / "ring.png")
    assert run(tmp_path / "none", synthetic["ring"], "--mask-dir", tmp_path / "masks") == 1
    assert "no tissue found in any of 54 tiles" in capsys.readouterr().err


def test_regions_give_classes(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "drawn", tmp_path / "set"
    annotate(
        folder, "ring", polygon(0, 0, 1100, 1600, "stroma"), polygon(512, 512, 1024, 1024, "gland")
    )
    annotate(
        folder,
        "strand",
        polygon(512, 512, 1536, 1024, "vessel"),
        polygon(1536, 512, 2048, 1024, None),
    )
    assert run(out, synthetic["ring"].parent, "--annotations", folder, "--min-tissue", 0.3) == 0
    data = ShardDataset(out)
    assert data.classes == ["gland", "stroma", "vessel"]
    for k in range(len(data)):
        sample = data.sample(k)
        inside = 512 <= sample.x < 1024 and 512 <= sample.y < 1024
        if sample.slide == "ring":
            assert sample.x < 1024
            assert sample.label == (0 if inside else 1)
        else:
            assert 512 <= sample.y < 1024
            assert sample.label == (2 if sample.x < 1536 else None)
    assert {label: count > 1 for label, count in Counter(data.labels.tolist()).items()} == {
        **{0: True, 1: True, 2: True, -1: True}
    }
    table = capsys.readouterr().out
    assert "unannotated" in table
    for row in rows(out).values():
        assert int(row["with_tissue"]) == int(row["unannotated"]) + int(row["written"])


def test_qupath_counts_from_the_scanned_part(
    tmp_path: Path, synthetic: dict[str, Path], everywhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "drawn"
    annotate(folder, "ring", polygon(0, 0, 512, 256, "a"))
    monkeypatch.setattr(Slide, "scanned_from", (512, 768))
    more = ("--annotations", folder, "--mask-dir", everywhere)
    assert run(tmp_path / "set", synthetic["ring"], *more) == 0
    data = ShardDataset(tmp_path / "set")
    assert [(data.sample(k).x, data.sample(k).y) for k in range(2)] == [(512, 768), (768, 768)]
    (folder / "ring.geojson").rename(folder / "qupath")
    corners = "".join(
        f'<Vertex X="{x}" Y="{y}"/>' for x, y in [(0, 0), (512, 0), (512, 256), (0, 256)]
    )
    (folder / "ring.xml").write_text(
        '<Annotations><Annotation Name="a"><Regions><Region><Vertices>'
        f"{corners}</Vertices></Region></Regions></Annotation></Annotations>"
    )
    assert run(tmp_path / "aperio", synthetic["ring"], *more) == 0
    data = ShardDataset(tmp_path / "aperio")
    assert [(data.sample(k).x, data.sample(k).y) for k in range(2)] == [(0, 0), (256, 0)]


def test_annotations_give_classes_and_labels_give_splits(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drawn"
    annotate(folder, "ring", polygon(0, 0, 1100, 1600, "stroma"))
    annotate(folder, "strand", polygon(512, 512, 1536, 1024, "vessel"))
    for name, text, remarked in (
        ("empty", "slide,label,split\nring,,train\nstrand,,val\n", False),
        ("missing", "slide,split\nring,train\nstrand,val\n", False),
        ("filled", "slide,label,split\nring,x,train\nstrand,y,val\n", True),
    ):
        (tmp_path / "labels.csv").write_text(text)
        more = ("--annotations", folder, "--labels", tmp_path / "labels.csv", "--min-tissue", 0.3)
        assert run(tmp_path / name, synthetic["ring"].parent, *more) == 0
        said = capsys.readouterr().err
        assert ("remark: using the classes of the annotations (stroma, vessel)" in said) == remarked
        data = ShardDataset(tmp_path / name)
        assert data.classes == ["stroma", "vessel"]
        samples = [data.sample(k) for k in range(len(data))]
        assert {(s.slide, s.split, s.label) for s in samples} == {
            ("ring", "train", 0),
            ("strand", "val", 1),
        }


def test_tiles_outside_of_annotations_are_background(
    tmp_path: Path, real: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, sets = tmp_path / "drawn", {}
    slide = real / "CMU-1-Small-Region.svs"
    annotate(folder, slide.stem, polygon(0, 0, 1100, 3000, "stroma"))
    (tmp_path / "labels.csv").write_text(f"slide,split\n{slide.stem},val\n")
    more = ("--annotations", folder, "--labels", tmp_path / "labels.csv", "--min-tissue", 0.3)
    for kind in (None, "drop", "background"):
        out = tmp_path / str(kind)
        assert run(out, slide, *more, *(("--unannotated", kind) if kind else ())) == 0
        data = ShardDataset(out)
        samples = [data.sample(k) for k in range(len(data))]
        sets[kind] = {(s.x, s.y): data.classes[s.label] for s in samples if s.label is not None}
        assert len(sets[kind]) == len(data)
        assert {s.split for s in samples} == {"val"}
    assert data.classes == ["background", "stroma"]
    assert sets["drop"] == sets[None]
    left = {place for place, name in sets["background"].items() if name == "stroma"}
    assert left == set(sets[None]) == {(x, y) for x, y in sets["background"] if x + 128 <= 1100}
    assert len(sets["background"]) > len(left) > 3
    (row,) = rows(tmp_path / "background").values()
    assert (row["unannotated"], row["with_tissue"]) == ("0", str(len(sets["background"])))
    # kept as it is by the same settings, and not mixed with tiles of others
    again = [str(k) for k in (slide, *more, "--out", tmp_path / "drop", *TILES)]
    assert main(again) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main([*again, "--unannotated", "background"]) == 2
    assert "already contains a data set" in capsys.readouterr().err


def test_a_slide_without_regions_may_be_background(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drawn"
    annotate(folder, "ring", polygon(0, 0, 1100, 1600, "tumor"), polygon(0, 0, 9, 9, "background"))
    annotate(folder, "strand")
    more = ("--annotations", folder, "--unannotated", "background")
    assert run(tmp_path / "set", synthetic["ring"].parent, *more) == 0
    data = ShardDataset(tmp_path / "set")
    assert data.classes == ["background", "tumor"]
    samples = [data.sample(k) for k in range(len(data))]
    assert {(s.slide, s.label) for s in samples} == {("ring", 0), ("ring", 1), ("strand", 0)}
    annotate(folder, "ring", polygon(0, 0, 1100, 1600, None))
    assert run(tmp_path / "none", synthetic["ring"].parent, *more) == 2
    assert "no region of --annotations" in capsys.readouterr().err
    (folder / "strand.geojson").unlink()  # a file that is missing may be a name misspelt
    annotate(folder, "ring", polygon(0, 0, 1100, 1600, "tumor"))
    assert run(tmp_path / "missing", synthetic["ring"].parent, *more) == 1
    assert "strand.tiff has no annotations" in capsys.readouterr().err


def test_without_any_class_an_empty_label_is_refused(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drawn"
    annotate(folder, "ring", polygon(0, 0, 1100, 1600, None))
    (tmp_path / "labels.csv").write_text("slide,label,split\nring,,train\n")
    more = ("--annotations", folder, "--labels", tmp_path / "labels.csv")
    assert run(tmp_path / "set", synthetic["ring"], *more) == 2
    assert "has an empty label for ring.tiff, and no region of" in capsys.readouterr().err


def test_regions_without_classes_only_say_where(
    tmp_path: Path, synthetic: dict[str, Path], everywhere: Path
) -> None:
    folder, out = tmp_path / "drawn", tmp_path / "set"
    annotate(folder, "ring", polygon(512, 512, 640, 1024, None), polygon(640, 512, 768, 1024, None))
    (tmp_path / "labels.csv").write_text("slide,label,split\nring,Ring,train\n")
    labels = ("--labels", tmp_path / "labels.csv", "--mask-dir", everywhere)
    assert run(out, synthetic["ring"], "--annotations", folder, *labels, "--min-tissue", 0.7) == 0
    data = ShardDataset(out)
    assert data.classes == ["Ring"]
    # half of each tile is of either class, all of it is annotated
    assert [(data.sample(k).x, data.sample(k).y) for k in range(len(data))] == [
        (512, 512),
        (512, 768),
    ]


def test_a_slide_with_bad_annotations_does_not_end_the_others(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "drawn", tmp_path / "set"
    annotate(folder, "ring", polygon(0, 0, 2304, 1600, "a"))
    (folder / "strand.xml").write_text(
        '<!DOCTYPE x [<!ENTITY a "aa">]><Annotations>&a;</Annotations>'
    )
    assert run(out, synthetic["ring"].parent, "--annotations", folder) == 1
    assert "strand.xml: it has a document type (x)" in capsys.readouterr().err
    assert int(rows(out)["ring"]["written"]) > 10
    (folder / "strand.xml").unlink()
    for features, says in [
        ([], "its annotations are empty"),
        ([polygon(9000, 0, 9900, 900, "far")], "none of its 1 annotated regions overlaps"),
    ]:
        annotate(folder, "strand", *features)
        assert run(out, synthetic["ring"].parent, "--annotations", folder) == 0
        assert f"strand has no tiles: {says}" in capsys.readouterr().err


def test_filters_are_counted(
    tmp_path: Path, synthetic: dict[str, Path], everywhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert (
        run(out, synthetic["ring"], "--mask-dir", everywhere, "--filter", "blur=0.45,white=0.8")
        == 0
    )
    row = {name: value for name, value in rows(out)["ring"].items() if value.isdigit()}
    counts = {name: int(value) for name, value in row.items()}
    assert counts["white"] > 5
    assert counts["with_tissue"] == 54 == counts["written"] + counts["white"] + counts["blur"]
    assert counts["written"] == len(ShardDataset(out))
    picture = np.asarray(Image.open(out / "pictures" / "ring.png"))
    assert (picture == (240, 150, 0)).all(-1).sum() > 500
    assert run(tmp_path / "none", synthetic["ring"], "--filter", "white=0,black") == 1
    err = capsys.readouterr().err
    assert "ring has no tiles: filters dropped every tile" in err
    assert "of those" in err
    assert "none of 1 slides has a tile" in err


@pytest.mark.parametrize("method", ["macenko", "reinhard", "vahadane"])
def test_stains_are_normalised(tmp_path: Path, synthetic: dict[str, Path], method: str) -> None:
    plain, out = tmp_path / "plain", tmp_path / "set"
    assert run(plain, synthetic["ring"]) == 0
    assert run(out, synthetic["ring"], "--stain-normalise", method) == 0
    before, after = ShardDataset(plain), ShardDataset(out)
    assert len(before) == len(after)
    first, second = (np.stack([image for image, _ in k]).astype(int) for k in (before, after))
    assert np.abs(first - second).mean() > 3
    white = (first >= 240).all(-1)
    assert np.abs(first - second)[white].mean() < 6
    again = tmp_path / "again"
    assert run(again, synthetic["ring"], "--stain-normalise", method) == 0
    assert (np.stack([image for image, _ in ShardDataset(again)]) == second).all()


def test_tiles_that_filters_drop_have_no_say_in_the_stains(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stains = ("--stain-normalise", "reinhard")
    everything, tissue = tmp_path / "a", tmp_path / "b"
    assert run(everything, synthetic["ring"], *stains) == 0
    assert run(tissue, synthetic["ring"], *stains, "--filter", "white=0.2") == 0
    first, second = ShardDataset(everything), ShardDataset(tissue)
    places = [(first.sample(k).x, first.sample(k).y) for k in range(len(first))]
    number = places.index((second.sample(0).x, second.sample(0).y))
    one, two = (np.asarray(k[0]).astype(int) for k in (first.read(number), second.read(0)))
    assert 0.2 < np.abs(one - two).mean() < 20
    # nothing to look at is the filters' doing, not a failure of the stains
    assert run(tmp_path / "c", synthetic["ring"], *stains, "--filter", "white=0") == 1
    assert "filters dropped every tile" in capsys.readouterr().err


def test_stains_are_told_once_a_slide(
    tmp_path: Path, synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def counted(slide: Slide, *more: Any) -> Any:
        asked.append(slide.path)
        return own_colours(slide, *more)

    monkeypatch.setattr(choosing, "own_colours", counted)
    assert run(tmp_path / "set", *synthetic.values(), "--stain-normalise", "macenko") == 0
    assert sorted(asked) == sorted(synthetic.values())


def test_a_reference_of_ones_own(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    picture = Image.new("RGB", (60, 40), (120, 60, 150))
    ImageDraw.Draw(picture).rectangle([0, 0, 29, 39], fill=(220, 150, 190))
    picture.save(tmp_path / "reference.png")
    given = ("--stain-reference", tmp_path / "reference.png")
    sets = [tmp_path / "a", tmp_path / "b"]
    assert run(sets[0], synthetic["ring"], "--stain-normalise", "reinhard") == 0
    assert run(sets[1], synthetic["ring"], "--stain-normalise", "reinhard", *given) == 0
    one, two = (ShardDataset(path).read(5) for path in sets)
    assert np.abs(np.asarray(one[0]).astype(int) - np.asarray(two[0])).mean() > 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--overlap", "256"], "--overlap is 256, expected 0 to 255"),
        (["--overlap", "-1"], "--overlap is -1"),
        (["--mask-dir", "nowhere"], "--mask-dir nowhere is not a folder"),
        (["--annotations", "nowhere"], "--annotations nowhere is not a folder"),
        (["--stain-reference", "a.png"], "requires --stain-normalise"),
        (["--stain-normalise", "reinhard", "--stain-reference", "a.png"], "cannot read stain ref"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path,
    synthetic: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    says: str,
) -> None:
    assert run(tmp_path / "set", synthetic["ring"], *more) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_a_filter_that_is_none_is_refused(
    tmp_path: Path, synthetic: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "set", synthetic["ring"], "--filter", "red")
    assert (
        "unknown filter 'red', expected one of black, white, pen, blur" in capsys.readouterr().err
    )


def test_a_dark_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = np.zeros((1024, 1024, 3), np.uint8)
    cells[256:768, 256:768] = (10, 30, 120)
    cells[::9, ::9][40:70, 40:70] = 250
    write_pyramid(tmp_path / "dark é 1.tif", [cells], (1024, 1024), 0.5)
    slide, out = tmp_path / "dark é 1.tif", tmp_path / "set"
    assert run(out, slide, "--filter", "blur=1") == 0
    data = ShardDataset(out)
    places = [(data.sample(k).x, data.sample(k).y) for k in range(len(data))]
    assert places == [(256, 256), (512, 256), (256, 512), (512, 512)]
    assert run(tmp_path / "none", slide, "--background", "bright", "--filter", "white") == 0
    more = ("--filter", "pen,blur", "--stain-normalise", "macenko")
    assert run(tmp_path / "other", slide, *more) == 1
    err = capsys.readouterr().err
    assert (
        "has a dark background, and --filter pen, --stain-normalise macenko supports only bright"
        in err
    )
