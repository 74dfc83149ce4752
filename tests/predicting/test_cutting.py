"""Cutting settings: recorded in the checkpoint, overridden by the command."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spatialdl.predicting.cutting import BatchCutting, cutting_of
from spatialdl.slides.reading.wanted import Wanted
from tests.composing import composed
from tests.predicting.runs import known_network, picture

SAID = {
    **{"tile_size": 44, "mpp": 0.7, "overlap": 6, "min_tissue": 0.2, "background": "bright"},
    **{"filter": {"pen": 0.1}, "stain_normalise": "reinhard", "slide_mpp": 0.3},
}
ASKED = {"tile_size": 50, "overlap": 3, "min_tissue": 0.9, "slide_mpp": 0.4}


def cutting(*words: str, task: str = "classification", **more: Any) -> BatchCutting:
    given = composed("predict", " ".join(words))
    return cutting_of(given, known_network(("a", "b"), task, **more))


def test_slides_are_cut_as_the_training_set():
    found = cutting(made_with=SAID)
    assert found == BatchCutting(
        44,
        (32, 32),
        Wanted(0.7),
        False,
        overlap=6,
        min_tissue=0.2,
        background="bright",
        filters={"pen": 0.1},
        stain_normalise="reinhard",
        slide_mpp=0.3,
    )
    options = vars(found.options())
    assert {key: options[key] for key in ("tile_size", "overlap", "background", "filter")} == {
        **{"tile_size": 44, "overlap": 6, "background": "bright", "filter": {"pen": 0.1}}
    }
    assert (options["stain_normalise"], options["whole"]) == ("reinhard", False)


def test_what_is_asked_for_goes_before_what_the_training_set_was():
    found = cutting(*(f"{key}={value}" for key, value in ASKED.items()), made_with=SAID)
    assert {key: getattr(found, key) for key in ASKED} == ASKED
    assert found.view == (50, 50)
    found = cutting("level=0", "overlap=0", "min_tissue=0", made_with=SAID)
    assert (found.wanted, found.overlap, found.min_tissue) == (Wanted(level=0), 0, 0.0)


def test_edges_are_as_in_the_training_set_or_as_asked_for():
    assert cutting("level=0", made_with={"edge": "pad"}).edge == "pad"
    assert cutting("level=0", "edge=shift", made_with={"edge": "pad"}).edge == "shift"
    assert cutting("level=0").edge == "drop"  # of sets of earlier versions, too
    assert cutting("level=0", "whole=true", made_with={"edge": "pad"}).edge == "drop"


def test_what_nobody_says_is_as_when_tiling():
    found = cutting("level=1")
    assert (found.tile_size, found.view) == (32, (32, 32))
    assert (found.overlap, found.min_tissue, found.background) == (0, 0.5, "auto")
    assert (found.filters, found.stain_normalise, found.slide_mpp) == (None, None, None)


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
        *({"tile_size": value} for value in (0, True, 32.0, "32", 2**21)),
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
        cutting_of(composed("predict", "level=0 overlap=3"), trained)
    found = cutting_of(composed("predict", "level=0"), trained)
    assert (found.as_pictures, found.view) == (True, (32, 24))
    found = cutting_of(composed("predict", "level=0 tile_size=32"), trained)
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
