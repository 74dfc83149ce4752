from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.slides.batch.labels import SlideLabel, read_labels

SLIDES = [Path("x/a.svs"), Path("y/b.1.tiff")]


def write(folder: Path, text: str) -> Path:
    path = folder / "labels.csv"
    path.write_bytes(text.encode("utf-8"))
    return path


@pytest.mark.parametrize(
    "text",
    [
        "slide,label,split\na.svs,good,train\nb.1,bad,val\n",
        "\ufeffslide,label,split\r\na,good,train\r\nb.1.tiff,bad,val\r\n",
        "split, label ,slide,note\ntrain, good ,a,x\nval,bad,b.1,\n\n",
    ],
)
def test_slides_are_named_with_or_without_suffix(tmp_path: Path, text: str) -> None:
    assert read_labels(write(tmp_path, text), SLIDES) == {
        SLIDES[0]: SlideLabel("good", "train"),
        SLIDES[1]: SlideLabel("bad", "val"),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no column slide, label, split"),
        ("slide,label\na,b\n", "has no column split"),
        ("slide;label;split\na;b;train\n", "its first line is 'slide;label;split'"),
        ("slide,label,split\na,g,train\nb.1,g,val\nc,g,val\n", "names c, which is not among"),
        ("slide,label,split\na,g,train\n", r"no line for b\.1\.tiff"),
        ("slide,label,split\na,g,train\na.svs,g,val\n", "line 3.*is a duplicate"),
        ("slide,label,split\na,,train\n", "line 2: label is empty"),
        ("slide,label,split\na,g\n", "line 2: split is empty"),
        ("slide,label,split\na,g,validation\n", "'validation', expected train, val, test"),
        ("slide,label,split\n\0,g,train\n", "is not"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        read_labels(write(tmp_path, text), SLIDES)
    assert "labels.csv" in str(caught.value)


def test_labels_may_be_empty_where_classes_come_from_elsewhere(tmp_path: Path) -> None:
    for text in ("slide,label,split\na,,train\nb.1,x,val\n", "split,slide\ntrain,a\nval,b.1\n"):
        found = read_labels(write(tmp_path, text), SLIDES, classes=False)
        assert {path: label.split for path, label in found.items()} == {
            SLIDES[0]: "train",
            SLIDES[1]: "val",
        }
        assert found[SLIDES[0]].label == ""
        with pytest.raises(ValueError, match="label"):
            read_labels(write(tmp_path, text), SLIDES)
    with pytest.raises(ValueError, match="has no column split"):
        read_labels(write(tmp_path, "slide\na\n"), SLIDES, classes=False)


def test_a_name_that_fits_two_slides_needs_its_suffix(tmp_path: Path) -> None:
    slides = [Path("a.svs"), Path("a.tiff")]
    head = "slide,label,split\n"
    with pytest.raises(ValueError, match=r"is ambiguous: a\.svs, a\.tiff"):
        read_labels(write(tmp_path, head + "a,g,train\n"), slides)
    found = read_labels(write(tmp_path, head + "a.svs,g,train\na.tiff,h,val\n"), slides)
    assert found[slides[1]].label == "h"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\0s")
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        read_labels(tmp_path / "labels.csv", SLIDES)
    with pytest.raises(ValueError, match="No such file"):
        read_labels(tmp_path / "none.csv", SLIDES)


def test_every_slide_without_a_line_is_named(tmp_path: Path) -> None:
    slides = [Path(f"{number:02}.svs") for number in range(30)]
    path = write(tmp_path, "slide,label,split\n07,good,train\n")
    with pytest.raises(ValueError, match="29 slides") as caught:
        read_labels(path, slides)
    assert all(slide.name in str(caught.value) for slide in slides if slide.stem != "07")
    found = read_labels(path, slides, unlabelled="skip")
    assert found == {slides[7]: SlideLabel("good", "train")}
