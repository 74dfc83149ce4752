"""What a batch is given: slides and their names, labels, options; what a slide is known by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spatialdl.common.files import storable
from spatialdl.data.outcomes import result_key
from spatialdl.slides.batch import record
from spatialdl.slides.batch.finding_slides import (
    SlideLabel,
    find_slides,
    read_labels,
    slide_names,
)
from spatialdl.slides.batch.record import sampled_digest, slide_key
from spatialdl.slides.batch.tile_options import parsed, settings_of
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import tile


def test_slides_are_found_in_folders(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "folder.svs").mkdir()
    for name in ("b.SVS", "a.tiff", "notes.txt", "more/a.tiff", "more/c"):
        (tmp_path / name).touch()
    assert find_slides([tmp_path, tmp_path / "a.tiff", tmp_path / "more" / "c"]) == [
        tmp_path / "a.tiff",
        tmp_path / "b.SVS",
        tmp_path / "more" / "c",
    ]
    found = find_slides([tmp_path], recursive=True)
    assert found == [tmp_path / "a.tiff", tmp_path / "b.SVS", tmp_path / "more" / "a.tiff"]


def test_what_is_given_twice_is_cut_once_and_what_is_not_there_refused(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.svs").touch()
    (tmp_path / "link.svs").symlink_to(tmp_path / "deep" / "a.svs")
    given = [tmp_path / "deep" / "a.svs", tmp_path / "link.svs", tmp_path / "deep/../deep/a.svs"]
    assert find_slides(given) == given[:1]
    (tmp_path / "link.svs").unlink()
    with pytest.raises(ValueError, match=r"cannot find slide .*none\.svs: there is no such file"):
        find_slides([tmp_path / "none.svs"])
    with pytest.raises(ValueError, match=r"has no slides in it .* --recursive"):
        find_slides([tmp_path])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (
            ["x/a.svs", "x/b.svs", "x/b.tiff", "y/b.tiff", "y/A.svs"],
            ["x_a.svs", "b.svs", "x_b.tiff", "y_b.tiff", "y_A.svs"],
        ),
        (["a.svs", "A.svs"], None),  # differ by capitals only
        (["x/a.svs", "y/a.svs", "z/x_a.svs.tiff"], None),  # made up, it is somebody's
    ],
)
def test_names_are_as_short_as_tells_them_apart(tmp_path, paths, names):
    found = list(slide_names([tmp_path / path for path in paths]).values())
    assert names in (None, found)
    assert len({name.casefold() for name in found}) == len(paths)


def test_names_are_those_of_single_files_and_stay_apart(tmp_path):
    names = ["../../x", "/etc/passwd", "a/b", "a_b", "..", ".", "a\0b", "x" * 300, "\ud800", "é"]
    stored = [storable(name) for name in names]
    for name in stored:
        (tmp_path / f"{name}.json").touch()
        assert storable(name) == name
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(stored)
    assert storable("a_b") == "a_b"


def test_a_key_tells_all_that_decides_on_tiles(tmp_path, small, monkeypatch):
    beside = tmp_path / "mask.png"
    beside.write_bytes(b"one")
    (tmp_path / "moved.tiff").write_bytes((small / "a.tiff").read_bytes())
    label, settings = SlideLabel("x", "train"), {"mpp": 0.5, "filter": {"pen": 0.1}}
    with (
        Slide(small / "a.tiff") as a,
        Slide(small / "b.tiff") as b,
        Slide(tmp_path / "moved.tiff") as moved,
    ):
        keys = [
            slide_key(a, "a", None, settings),
            slide_key(b, "a", None, settings),
            slide_key(a, "b", None, settings),
            slide_key(a, "a", label, settings),
            slide_key(a, "a", label._replace(label="y"), settings),
            slide_key(a, "a", label._replace(split="val"), settings),
            slide_key(a, "a", label._replace(mpp=0.25), settings),
            slide_key(a, "a", None, {**settings, "mpp": 1.0}),
            slide_key(a, "a", None, settings, [beside]),
        ]
        beside.write_bytes(b"two")
        keys.append(slide_key(a, "a", None, settings, [beside]))
        assert slide_key(a, "a", None, dict(reversed(settings.items()))) == keys[0]
        assert slide_key(moved, "a", None, settings) == keys[0]
        monkeypatch.setattr(record, "CUTTING_VERSION", -1)
        keys.append(slide_key(a, "a", None, settings))
    assert len(set(keys)) == len(keys)
    # of earlier versions, too, whose results are taken over
    content = [3, {"b": 1, "a": "é"}]
    assert result_key(content).startswith("a0d8f558e093b174")
    assert result_key(content, sort_keys=False).startswith("f64e4867bf23a710")


@pytest.mark.parametrize("size", [0, 2**20 + 1, 20 * 2**20])
def test_a_digest_sees_length_start_middle_and_end(tmp_path, size):
    path, found = tmp_path / "a", set()
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    places = sorted({0, 19 * size * 7 // 300 + 3, size - 1}) if size > 9 else range(size)
    for place in (None, *places):
        other = content.copy()
        if place is not None:
            other[place] ^= 1
        path.write_bytes(other.tobytes())
        found.add(sampled_digest(path))
    path.write_bytes(content.tobytes() + b"\0")
    found.add(sampled_digest(path))
    assert len(found) == len(places) + 2


SLIDES = [Path("x/a.svs"), Path("y/b.1.tiff")]


def write_labels(folder: Path, text: str) -> Path:
    path = folder / "labels.csv"
    path.write_bytes(text.encode("utf-8"))
    return path


def test_slides_are_named_with_or_without_suffix(tmp_path):
    for text in (
        "\ufeffslide,label,split\r\na.svs,good,train\r\nb.1,bad,val\r\n",
        "split, label ,slide,note\ntrain, good ,a,x\nval,bad,b.1.tiff,\n\n",
    ):
        assert read_labels(write_labels(tmp_path, text), SLIDES) == {
            SLIDES[0]: SlideLabel("good", "train"),
            SLIDES[1]: SlideLabel("bad", "val"),
        }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slide,label\na,b\n", "has no column split"),
        ("slide,label,split\na,g,train\nb.1,g,val\nc,g,val\n", "names c, not among"),
        ("slide,label,split\na,g,train\n", r"no line for b\.1\.tiff"),
        ("slide,label,split\na,g,train\na.svs,g,val\n", "line 3.*is a duplicate"),
        ("slide,label,split\na,,train\n", "line 2: label is empty"),
        ("slide,label,split\na,g,dev\n", "'dev', expected train, val or test"),
    ],
)
def test_mistakes_in_labels_are_named(tmp_path, text, says):
    with pytest.raises(ValueError, match=says) as caught:
        read_labels(write_labels(tmp_path, text), SLIDES)
    assert "labels.csv" in str(caught.value)


def test_labels_may_be_empty_where_classes_come_from_elsewhere(tmp_path):
    for text in ("slide,label,split\na,,train\nb.1,x,val\n", "split,slide\ntrain,a\nval,b.1\n"):
        found = read_labels(write_labels(tmp_path, text), SLIDES, classes=False)
        assert {path: label.split for path, label in found.items()} == {
            SLIDES[0]: "train",
            SLIDES[1]: "val",
        }
        assert found[SLIDES[0]].label == ""
        with pytest.raises(ValueError, match="label"):
            read_labels(write_labels(tmp_path, text), SLIDES)
    with pytest.raises(ValueError, match="has no column split"):
        read_labels(write_labels(tmp_path, "slide\na\n"), SLIDES, classes=False)


GIVEN = ["a.svs", "--out", "set", "--mpp", "0.5"]
TILES = [*GIVEN, "--tile-size", "256"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        *(
            (clash, "cannot be combined")
            for clash in [
                *("--stain-normalise macenko --format coords", "--whole --overlap 8"),
                *("--whole --unannotated drop --annotations drawn", "--whole --edge shift"),
                *("--edge pad --format coords", "--edge shift --codec jpeg-native"),
            ]
        ),
        ("--stripes 2", "--stripes applies to whole regions; add --whole"),
        ("--unannotated background", "requires --annotations"),
        ("--overlap 256", "--overlap is 256, expected 0 to 255"),
        ("--mask-dir nowhere", "--mask-dir nowhere is not a folder"),
        ("--stain-reference a.png", "requires --stain-normalise"),
        ("--stain-normalise reinhard --stain-reference a.png", "cannot read stain ref"),
        ("--jobs ²", "'²' is not a whole number of at least 1"),
        ("--quality 101", "'101' is not a JPEG quality from 1 to 100"),
        ("--tile-size 64 --whole", "not allowed with argument --tile-size"),
        ("--filter green", "unknown filter 'green', expected one of black, white, pen, blur"),
        ("--mag 20", "not allowed with argument --mpp"),
        ("--level -1", "'-1' is not a level"),
        *(
            (f"{option} {value}", f"argument {option}: '{value}' is not")
            for option, value in [
                *(("--mpp", "353"), ("--mag", "0"), ("--slide-mpp", "x"), ("--min-tissue", "nan")),
            ]
        ),
    ],
)
def test_options_that_are_refused(tmp_path, monkeypatch, capsys, more, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.svs").touch()
    given = GIVEN if more.startswith("--whole") else TILES
    try:
        code = tile(*given, *more.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_tiles_outside_of_annotations_are_a_setting():
    drawn = [*TILES, "--annotations", "drawn"]
    plain, drop, background = (
        settings_of(parsed([*drawn, *more]), ["a"])
        for more in ([], ["--unannotated", "drop"], ["--unannotated", "background"])
    )
    assert plain == drop  # so that data sets are added to as before
    assert background == {**plain, "unannotated": "background"}


def test_settings_survive_json_and_tell_what_decides_on_tiles():
    settings = settings_of(parsed([*TILES, "--filter", "pen,blur=0.5"]), ["a", "b"])
    assert json.loads(json.dumps(settings)) == settings
    assert settings["classes"] == ["a", "b"]
    others = """--codec jpeg|--min-tissue 0.4|--overlap 8|--filter pen|--shard-size 1M|--mask-dir .
        |--annotations .|--stain-normalise macenko|--format coords|--slide-mpp 0.5|--edge pad
        |--background dark"""
    found = [settings_of(parsed([*TILES, *more.split()]), []) for more in others.split("|")]
    assert all(one != two for one in found for two in found if one is not two)
    # who does the work, and where, does not matter
    for more in (["--jobs", "3"], ["--overwrite"], ["--skip-errors"], ["--recursive"]):
        assert settings_of(parsed([*TILES, *more]), []) == settings_of(parsed(TILES), [])
