"""Which slides are predicted, how they are cut, and what is read of them."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.cutting import BatchCutting, cutting_of
from spatialdl.inference.predicting.inputs import SlideImages, shard_inputs, slide_input
from spatialdl.inference.predicting.records import key_of
from spatialdl.inference.predicting.slide_paths import slide_paths, volume_names, volume_paths
from spatialdl.slides.cutting.grid import Wanted
from spatialdl.slides.reading.reader import Slide
from tests.composing import composed
from tests.data.importing.written import oblique, save, slices, voxels
from tests.inference.predicting.runs import known_network, picture, write_slide
from tests.slides.dicom_series import uid, write_series
from tests.slides.tiled_tiffs import write_tiff


@pytest.mark.parametrize(("scale", "large"), [(1.0, 2048), (1.7, 2048), (1.7, 64), (3.0, 64)])
def test_an_image_has_the_same_pixels_however_it_is_divided(scale, large, tmp_path, monkeypatch):
    # a narrow box, and one that begins between two pixels, were off by up to two levels once
    monkeypatch.setattr("spatialdl.inference.predicting.inputs.LARGE", large)
    path, size = write_slide(tmp_path / "a.tiff", 500, 460), (151, 137)
    images = SlideImages(path, None, [(3, 5), (0, 0)], size, scale)
    whole = images.read(0)
    assert whole.shape == (*size, 3)
    rng = np.random.default_rng(0)
    for _ in range(10):
        row0, row1 = sorted(rng.choice(size[0] + 1, 2, replace=False).tolist())
        col0, col1 = sorted(rng.choice(size[1] + 1, 2, replace=False).tolist())
        part = images.read(0, (row0, row1, col0, col1))
        assert np.array_equal(part, whole[row0:row1, col0:col1])
    assert images.read(1, (4, 4, 0, 9)).shape == (0, 9, 3)
    with Slide(path) as slide:
        expected = slide.read_scaled(3, 5, size, scale)
    assert np.abs(whole.astype(int) - expected).max() <= (0 if large > 500 else 2)
    images.close()
    assert np.array_equal(pickle.loads(pickle.dumps(images)).read(0), whole)


def test_a_picture_as_large_as_the_training_images_is_one_image(tmp_path):
    """A rectangular PNG was refused without a tile size, and one without tissue had no tiles."""
    pixels = np.full((32, 24, 3), 250, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    cutting = BatchCutting(32, (32, 24), Wanted(level=0), whole=False, as_pictures=True)
    found = slide_input(tmp_path / "a.png", "a", cutting)
    assert (found.places, found.size, found.span, found.whole) == (
        *([(0, 0)], (32, 24), (32.0, 24.0), False),
    )
    assert np.array_equal(found.source.read(0, (1, 30, 2, 9)), pixels[1:30, 2:9])
    with pytest.raises(SlideError, match=r"a.* is 32x24 pixels, and .* of 24x32, but tiles are"):
        slide_input(tmp_path / "a.png", "a", replace(cutting, view=(24, 32)))


def shards(folder: Path, places: list[tuple[int, int]], **made_with: object) -> ShardDataset:
    with ShardWriter(folder, classes=["a"], mpp=1.0, made_with=made_with) as writer:
        for number, xy in enumerate(places):
            image = np.full((16, 16, 3), number, np.uint8)
            writer.add(image, slide="s", xy=xy)
    return ShardDataset(folder)


def test_tiles_of_shards_say_by_their_places_how_large_they_are(tmp_path):
    grid = [(round(x * 24.6), round(y * 24.6)) for x in range(4) for y in range(3)]
    (found,) = shard_inputs(shards(tmp_path / "a", grid, overlap=4), (16, 16), maps=False)
    assert found.span == pytest.approx((32.8, 32.8), rel=0.03)
    assert found.mpp == pytest.approx(16 / 32.8, rel=0.03)
    assert found.places == grid
    grid = [(x, y) for x in (0, 32, 64, 96, 101) for y in (0, 32, 64, 96, 123)]
    (found,) = shard_inputs(shards(tmp_path / "c", grid, edge="shift"), (16, 16), maps=False)
    assert (found.span, found.extent) == ((32.0, 32.0), (155, 133))
    lonely = [(0, 0), (320, 0), (32, 1000)]  # of which nobody can tell
    (found,) = shard_inputs(shards(tmp_path / "b", lonely), (16, 16), maps=False)
    assert found.span is None
    assert found.extent is None


def test_each_region_is_a_slide_of_its_own_where_maps_are_told(tmp_path):
    dataset = shards(tmp_path / "a", [(0, 0), (16, 0)])
    found = shard_inputs(dataset, (16, 16), maps=True)
    assert [one.name for one in found] == ["s_1", "s_2"]
    assert all(one.whole and one.size == one.extent == (16, 16) for one in found)
    assert found[1].source.read(0)[0, 0, 0] == 1


@pytest.mark.parametrize("edge", ["drop", "pad", "shift"])
def test_tiles_at_the_edges_of_slides(tmp_path, edge, caplog):
    image = np.zeros((200, 150, 3), np.uint8)
    image[60:, 40:, 2] = 150
    image[180:] //= 2
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    cut = BatchCutting(64, (64, 64), Wanted(level=0), whole=False, min_tissue=0.04, edge=edge)
    found = slide_input(tmp_path / "a.tiff", "a", replace(cut, background="dark"))
    says = "a: 25% of its tissue is in no tile: " in caplog.text and "edge=pad or" in caplog.text
    assert says == (edge == "drop")
    last = {"drop": (64, 128), "pad": (128, 192), "shift": (86, 136)}[edge]
    assert found.places[-1] == last
    x, y = last
    expected = np.zeros((64, 64, 3), np.uint8)  # as dark as the slide, beyond it
    part = image[y : y + 64, x : x + 64]
    expected[: len(part), : part.shape[1]] = part
    assert np.array_equal(found.source.read(len(found.places) - 1), expected)
    box = (3, 40, 5, 64)
    assert np.array_equal(found.source.read(len(found.places) - 1, box), expected[3:40, 5:64])


def test_tiles_that_cannot_be_read_are_kept_to_be_reported_unless_all_are(tmp_path):
    cut = BatchCutting(32, (32, 32), Wanted(level=0), whole=False)
    path = write_tiff(tmp_path / "a.tif", [picture(256, 256)], side=64)
    sound = slide_input(path, "a", cut).places
    with tifffile.TiffFile(path) as file:
        places = list(zip(file.pages[0].dataoffsets, file.pages[0].databytecounts, strict=True))
    content = bytearray(path.read_bytes())
    for torn in (places[5:6], places):
        for offset, count in torn:
            content[offset : offset + count] = bytes(count)
        path.write_bytes(content)
        if torn == places:
            with pytest.raises(SlideError, match="has no tiles: cannot read slide"):
                slide_input(path, "a", cut)
        else:
            found = slide_input(path, "a", cut)
            assert set(found.places) == set(sound)
            for number in range(len(found.places)):
                found.source.read(number)
            assert {found.places[number] for number in found.source.unreadable} == {
                (x, y) for x in (64, 96) for y in (64, 96)
            }


SAID = {
    **{"tile_size": 44, "mpp": 0.7, "overlap": 6, "min_tissue": 0.2, "background": "bright"},
    **{"filter": {"pen": 0.1}, "stain_normalise": "reinhard", "slide_mpp": 0.3},
}
ASKED = {"tile_size": 50, "overlap": 3, "min_tissue": 0.9, "slide_mpp": 0.4}


def cutting(*words: str, task: str = "classification", **more: Any) -> BatchCutting:
    given = composed("predict", *words)
    return cutting_of(given, known_network(("a", "b"), task, **more))


def test_slides_are_cut_as_the_training_set():
    found = cutting(made_with=SAID)
    kept = {key: SAID[key] for key in SAID if key not in ("mpp", "filter")}
    assert {key: getattr(found, key) for key in kept} == kept
    assert (found.view, found.wanted, found.whole) == ((32, 32), Wanted(0.7), False)
    options = vars(found.options())
    for key in ("tile_size", "overlap", "background"):
        assert options[key] == SAID[key]
    assert found.filters == options["filter"] == {"pen": 0.1}
    assert (options["stain_normalise"], options["whole"]) == ("reinhard", False)


def test_what_is_asked_for_goes_before_what_the_training_set_was():
    found = cutting(*(f"{key}={value}" for key, value in ASKED.items()), made_with=SAID)
    assert {key: getattr(found, key) for key in ASKED} == ASKED
    assert found.view == (50, 50)
    found = cutting("level=0", "overlap=0", "min_tissue=0", made_with=SAID)
    assert (found.wanted, found.overlap, found.min_tissue) == (Wanted(level=0), 0, 0.0)
    assert cutting("level=0", made_with={"edge": "pad"}).edge == "pad"
    assert cutting("level=0", "edge=shift", made_with={"edge": "pad"}).edge == "shift"
    assert cutting("level=0").edge == "drop"  # of sets of earlier versions, too
    assert cutting("level=0", "whole=true", made_with={"edge": "pad"}).edge == "drop"


def test_regions_and_maps_are_of_the_whole_tissue():
    assert cutting(made_with=SAID, kind="regions").whole
    assert not cutting("whole=false", made_with=SAID, kind="regions").whole
    found = cutting(task="segmentation", made_with=SAID)
    assert found.whole
    assert found.view == (found.tile_size, found.tile_size)
    assert found.filters == {}  # which are asked of tiles
    with pytest.raises(ValueError, match=r"whole=false cuts tiles, .* has seams"):
        cutting("whole=false", task="segmentation", made_with=SAID)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tile_size": value} for value in (0, True, 32.0, 2**21)),
        *({"overlap": -1}, {"level": -1}, {"mpp": 0}, {"mpp": True}, {"slide_mpp": -0.5}),
        *({"mag": 0}, {"min_tissue": 1.5}, {"background": "green"}, {"background": []}),
        *({"stain_normalise": "washing"}, {"filter": ["pen"]}, {"filter": {"cats": 0.1}}),
        *({"filter": {"pen": 2}}, {"edge": "fold"}, {"edge": True}),
    ],
    ids=str,
)
def test_what_cannot_be_of_training_images_is_refused(wrong):
    (key,) = wrong
    with pytest.raises(ValueError, match=f"the checkpoint has an invalid {key}="):
        cutting("level=0", made_with={**SAID, **wrong})


@pytest.mark.parametrize(
    ("words", "made_with", "sentence"),
    [
        ("", {}, "does not record the resolution"),
        ("level=0 edge=fold", {}, "edge=fold must be one of drop, pad, shift"),
        ("", {"overlap": 32, "mpp": 1}, "overlap=32 must be less than tile_size=32"),
        ("stain_reference=a.png level=0", {}, "training set were not normalised"),
        ("", {"mpp": 1, "stain_normalise": "macenko", "stain_reference": True}, "give that image"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words, made_with, sentence):
    with pytest.raises(ValueError, match=sentence):
        cutting(*words.split(), made_with=made_with)


def test_tiles_are_squares_even_if_training_images_are_not():
    trained = known_network(("a", "b"))
    trained.config.data.image_size = [32, 24]
    with pytest.raises(ValueError, match="images of 32x24, but tiles are square: add tile"):
        cutting_of(composed("predict", "level=0", "overlap=3"), trained)
    found = cutting_of(composed("predict", "level=0"), trained)
    assert (found.as_pictures, found.view) == (True, (32, 24))
    found = cutting_of(composed("predict", "level=0", "tile_size=32"), trained)
    assert (found.tile_size, found.as_pictures) == (32, False)


def test_whatever_changes_the_images_changes_the_key(tmp_path):
    """Otherwise predictions of other images would be reused."""
    before = cutting(made_with=SAID)
    other = {
        **{"tile_size": 45, "view": (44, 44), "wanted": Wanted(0.8), "whole": True, "overlap": 5},
        **{"edge": "pad", "min_tissue": 0.3, "background": "dark", "filters": {"pen": 0.2}},
        **{"stain_normalise": "macenko", "stain_reference": str(image(tmp_path)), "slide_mpp": 1},
        "as_pictures": True,
    }
    assert set(other) == {one.name for one in fields(BatchCutting)}
    keys = [before.key(), *(replace(before, **{key: other[key]}).key() for key in other)]
    assert all(one != two for number, one in enumerate(keys) for two in keys[:number])
    referred = replace(before, stain_reference=other["stain_reference"])
    key = referred.key()
    assert referred.key() == key
    path = image(tmp_path, seed=1)  # another one of its name
    os.utime(path, ns=(1, 1))
    assert referred.key() != key


def image(folder: Path, seed: int = 0) -> Path:
    Image.fromarray(np.asarray(picture(64, 64, seed))).save(folder / "reference.png")
    return folder / "reference.png"


A, B = uid("a"), uid("b")


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """Two folders, one with a series and one with two."""
    write_series(tmp_path / "one", picture(200, 150), A)
    for series in (B, uid("c")):
        write_series(tmp_path / "two", picture(200, 150), series, 1, name=series + "{}.dcm")
    return tmp_path


def test_series_are_given_by_folders_uids_files_and_patterns(cases: Path) -> None:
    one, two = cases / "one", cases / "two"
    for given in (one, one / A, [one, one / "level-1.dcm"], one / "*.dcm", cases / "on*"):
        found = slide_paths([*map(str, given)] if isinstance(given, list) else str(given))
        assert [path.resolve() for path in found] in ([one], [one / A])
    assert slide_paths(str(two / B)) == [two / B]
    assert len(slide_paths(str(cases / "*"))) == 3
    with pytest.raises(ValueError, match="matches no file or folder"):
        slide_paths(str(two / uid("d")))


def test_slides_in_folders_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("top/a.tif", "top/x/b.tif", "top/x/y/c.tif"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert [one.name for one in slide_paths("top/**/*.tif")] == ["a.tif", "b.tif", "c.tif"]
    assert [one.name for one in slide_paths(["top/x"])] == ["b.tif"]
    Path("bare/x").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"bare has no slides in it .* such as 'FOLDER/\*\*/"):
        slide_paths("bare")


def test_a_series_is_predicted_anew_when_one_of_its_files_changes(cases: Path) -> None:
    before = key_of([], cases / "one")
    assert key_of([], cases / "one") == before == key_of([], cases / "one" / A)
    write_series(cases / "one", 255 - picture(200, 150), A, name="level-{}.dcm")
    assert key_of([], cases / "one") != before


def test_volumes_are_given_by_files_folders_and_patterns(tmp_path: Path) -> None:
    files = [tmp_path / case / name for case in "pq" for name in ("ct.nii.gz", "pet.nii")]
    for path in (*files, tmp_path / "p" / "notes.txt", tmp_path / "p" / ".hidden.nii"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert volume_paths(str(tmp_path / "p")) == files[:2]
    assert volume_paths([str(tmp_path / "q"), str(files[0]), str(files[0])]) == [
        *files[2:],
        files[0],
    ]
    assert volume_paths(str(tmp_path / "*" / "ct*")) == files[::2]
    save(slices(voxels(), oblique()), tmp_path / "d" / "ct1")
    (tmp_path / "d" / "a.ome.zarr").mkdir()
    given = [tmp_path / "d" / "a.ome.zarr", tmp_path / "d" / "ct1"]
    assert volume_paths(str(tmp_path / "d")) == given
    assert volume_paths([*map(str, given)]) == given
    assert list(volume_names(files[:2]).values()) == ["ct", "pet"]
    assert list(volume_names(files[::2]).values()) == ["p_ct.nii.gz", "q_ct.nii.gz"]
    (tmp_path / "empty").mkdir()
    for given, said in (
        ("none*", "matches no file or folder"),
        ("empty", r"empty contains no files of \.nii, \.nii\.gz"),
        ("p/notes.txt", r"notes\.txt is not a file of \.nii"),
    ):
        with pytest.raises(ValueError, match=said):
            volume_paths(str(tmp_path / given))
    with pytest.raises(ValueError, match=r"volumes=\[\] names no volume"):
        volume_paths([])
