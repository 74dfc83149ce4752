"""Which tiles there are, and what they look like: masks, annotations, filters, stains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.slides.batch import choosing
from spatialdl.slides.cutting.stains import own_colours
from spatialdl.slides.cutting.tiling import TilePlan
from spatialdl.slides.pyramid import write_pyramid
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic import write_synthetic_slide
from tests.slides.batch.batches import annotate, places, polygon, rows, samples, tile

pytestmark = pytest.mark.usefixtures("quick")
SIZE = ["--tile-size", "128", "--mpp", "0.5"]


def run(out: Path, *arguments: object) -> int:
    return tile(*arguments, "--out", out, "--overwrite", *SIZE)


@pytest.fixture
def everywhere(tmp_path: Path) -> Path:
    """Masks by which all of the ring is tissue."""
    (tmp_path / "masks").mkdir()
    Image.new("L", (23, 16), 255).save(tmp_path / "masks" / "ring.png")
    return tmp_path / "masks"


def test_masks_say_where_tiles_are(tmp_path, halves, capsys):
    mask = np.zeros((160, 230), np.uint8)
    mask[:52, :77] = 255
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks" / "ring.png")
    out = tmp_path / "set"
    # strand has no mask: the row says so, the batch goes on
    assert run(out, halves["ring"].parent, "--mask-dir", tmp_path / "masks") == 1
    assert "strand.tiff has no mask: there is no strand.png in" in capsys.readouterr().err
    assert rows(out)["strand"]["status"] == "failed"
    assert set(places(out)) == {(128 * i, 128 * j) for i in range(3) for j in range(2)}


def test_regions_give_classes_and_labels_give_splits(tmp_path, halves, capsys):
    out, stroma = tmp_path / "set", polygon(0, 0, 550, 800, "stroma")
    folder, labels = tmp_path / "drawn", tmp_path / "labels.csv"
    annotate(folder, "ring", stroma, polygon(256, 256, 512, 512, "gland"))
    unknown = polygon(768, 256, 1024, 512, None)
    annotate(folder, "strand", polygon(256, 256, 768, 512, "vessel"), unknown)
    labels.write_text("slide,label,split\nring,x,train\nstrand,x,val\n")
    more = ("--annotations", folder, "--labels", labels, "--min-tissue", 0.3)
    assert run(out, halves["ring"].parent, *more) == 0
    told = capsys.readouterr()
    assert "remark: using the classes of the annotations (gland, stroma, vessel)" in told.err
    assert "unannotated" in told.out
    data = ShardDataset(out)
    assert data.classes == ["gland", "stroma", "vessel"]
    for sample in samples(out):
        inside = 256 <= sample.x < 512 and 256 <= sample.y < 512
        if sample.slide == "ring":
            assert sample.x < 512
            assert (sample.label, sample.split) == (0 if inside else 1, "train")
        else:
            assert 256 <= sample.y < 512
            assert (sample.label, sample.split) == (2 if sample.x < 768 else None, "val")
    assert set(data.labels.tolist()) == {0, 1, 2, -1}
    for row in rows(out).values():
        assert int(row["with_tissue"]) == int(row["unannotated"]) + int(row["written"])


def test_qupath_counts_from_the_scanned_part(tmp_path, halves, everywhere, monkeypatch):
    folder = tmp_path / "drawn"
    annotate(folder, "ring", polygon(0, 0, 256, 128, "a"))
    monkeypatch.setattr(Slide, "scanned", (256, 384, 99, 99))
    more = ("--annotations", folder, "--mask-dir", everywhere)
    assert run(tmp_path / "set", halves["ring"], *more) == 0
    assert places(tmp_path / "set") == [(256, 384), (384, 384)]
    (folder / "ring.geojson").rename(folder / "qupath")
    corners = [(0, 0), (256, 0), (256, 128), (0, 128)]
    (folder / "ring.xml").write_text(
        '<Annotations><Annotation Name="a"><Regions><Region><Vertices>'
        + "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in corners)
        + "</Vertices></Region></Regions></Annotation></Annotations>"
    )
    assert run(tmp_path / "aperio", halves["ring"], *more) == 0
    assert places(tmp_path / "aperio") == [(0, 0), (128, 0)]


def test_a_slide_without_regions_may_be_background(tmp_path, halves, capsys):
    folder, labels = tmp_path / "drawn", tmp_path / "labels.csv"
    slides, tumor = halves["ring"].parent, polygon(0, 0, 550, 800, "tumor")
    annotate(folder, "ring", tumor, polygon(0, 0, 9, 9, "background"))
    annotate(folder, "strand")
    more = ("--annotations", folder, "--unannotated", "background")
    assert run(tmp_path / "set", slides, *more) == 0
    assert ShardDataset(tmp_path / "set").classes == ["background", "tumor"]
    found = {(s.slide, s.label) for s in samples(tmp_path / "set")}
    assert found == {("ring", 0), ("ring", 1), ("strand", 0)}
    assert {row["unannotated"] for row in rows(tmp_path / "set").values()} == {"0"}
    for sample in samples(tmp_path / "set"):
        assert (sample.label == 1) == (sample.slide == "ring" and sample.x + 64 <= 550)
    # not mixed with tiles of other settings
    assert tile(slides, *more[:2], "--out", tmp_path / "set", *SIZE) == 2
    assert "already contains a data set" in capsys.readouterr().err
    annotate(folder, "ring", polygon(0, 0, 550, 800, None))
    labels.write_text("slide,label,split\nring,,train\n")  # nor has the table a class
    drawn = ("--annotations", folder, "--labels", labels)
    assert run(tmp_path / "none", halves["ring"], *drawn) == 2
    assert "has an empty label for ring.tiff, and no region of" in capsys.readouterr().err
    assert run(tmp_path / "none", slides, *more) == 2
    assert "no region of --annotations" in capsys.readouterr().err


def test_filters_are_counted(tmp_path, halves, everywhere, capsys):
    out, slide = tmp_path / "set", halves["ring"]
    more = ("--mask-dir", everywhere, "--filter", "blur=0.45,white=0.8")
    assert run(out, slide, *more) == 0
    counts = {name: int(n) for name, n in rows(out)["ring"].items() if n.isdigit()}
    assert counts["white"] > 5
    assert counts["with_tissue"] == 54 == counts["written"] + counts["white"] + counts["blur"]
    assert counts["written"] == len(ShardDataset(out))
    picture = np.asarray(Image.open(out / "pictures" / "ring.png"))
    assert (picture == (240, 150, 0)).all(-1).sum() > 500
    assert run(tmp_path / "coords", slide, *more, "--format", "coords") == 0
    with h5py.File(tmp_path / "coords" / "coords" / "clam" / "patches" / "ring.h5") as file:
        assert file["coords"][:].tolist() == [list(place) for place in places(out)]
        assert file["coords"].attrs["save_path"] == f"{tmp_path}/coords/coords/clam/patches"
    assert run(tmp_path / "none", slide, "--filter", "white=0,blur=0") == 1
    err = capsys.readouterr().err
    assert "ring has no tiles: filters dropped every tile" in err
    assert "of those" in err
    assert "none of 1 slides has a tile" in err


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of six tiles."""
    path = tmp_path_factory.mktemp("ring") / "ring.tiff"
    write_synthetic_slide(path, "ring", (300, 420), seed=1)
    return path


def pixels(out: Path) -> np.ndarray:
    return np.stack([image for image, _ in ShardDataset(out)]).astype(int)


def test_stains_are_normalised(tmp_path, ring, monkeypatch):
    asked: list[Path] = []

    def counted(slide: Slide, plan: TilePlan, method: Any, refused: Any) -> Any:
        asked.append(slide.path)
        assert refused(np.zeros((128, 128, 3), np.uint8)) == "black"  # it has no say in the stains
        return own_colours(slide, plan, method, refused)

    monkeypatch.setattr(choosing, "own_colours", counted)
    plain = ("--min-tissue", 0.1, "--filter", "black")
    more = ("--stain-normalise", "vahadane", *plain)
    assert run(tmp_path / "plain", ring, *plain) == 0
    assert asked == []
    assert run(tmp_path / "set", ring, *more) == 0
    assert asked == [ring]  # once a slide
    first, second = pixels(tmp_path / "plain"), pixels(tmp_path / "set")
    assert np.abs(first - second).mean() > 3
    white = (first >= 240).all(-1)
    assert np.abs(first - second)[white].mean() < 6
    # the preview has the colours of the tiles
    previews = [tmp_path / name / "pictures" / "ring.stitched.jpg" for name in ("plain", "set")]
    one, two = (np.asarray(Image.open(path)).astype(int) for path in previews)
    shift = (second - first).mean((0, 1, 2))
    assert (two - one)[(one != 208).any(-1)].mean(0) == pytest.approx(shift, abs=12)
    # to a reference of one's own
    picture = np.full((40, 60, 3), (120, 60, 150), np.uint8)
    picture[:, :30] = (220, 150, 190)
    Image.fromarray(picture).save(tmp_path / "reference.png")
    given = ("--stain-reference", tmp_path / "reference.png")
    assert run(tmp_path / "other", ring, *more, *given) == 0
    assert np.abs(pixels(tmp_path / "other") - second).mean() > 3


def test_a_dark_slide(tmp_path, capsys):
    cells = np.zeros((512, 512, 3), np.uint8)
    cells[128:384, 128:384] = (10, 30, 120)
    cells[::9, ::9][20:35, 20:35] = 250
    slide, out = tmp_path / "dark é 1.tif", tmp_path / "set"
    write_pyramid(slide, [cells], (512, 512), 0.5)
    assert run(out, slide, "--filter", "blur=1") == 0
    assert places(out) == [(128, 128), (256, 128), (128, 256), (256, 256)]
    for name in ("dark é 1.stitched.jpg", "dark é 1.png"):  # which are stretched
        with Image.open(out / "pictures" / name) as picture:
            middle = picture.getpixel((picture.width // 2, picture.height // 2))
            assert middle[2] > 200, name
            assert max(middle[:2]) < 100
    assert run(tmp_path / "none", slide, "--background", "bright", "--filter", "white") == 0
    more = ("--filter", "pen,blur", "--stain-normalise", "macenko")
    assert run(tmp_path / "other", slide, *more) == 1
    said = "a dark background, and --filter pen, --stain-normalise macenko supports only bright"
    assert said in capsys.readouterr().err
