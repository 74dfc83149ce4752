from __future__ import annotations

import pytest

from spatialdl.data.augmentation.settings import Augmentation


def test_as_it_comes_nothing_is_changed():
    assert Augmentation.from_config(None) == Augmentation.from_config({}) == Augmentation()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"flop": 0.5}, "data.augment.flop is unknown: there are crop, flip, rotate"),
        ({"crop": "corner"}, "data.augment.crop=corner is unknown: take centre or random"),
        ({"rotate": 90}, "data.augment.rotate=90 must be true or false"),
        ({"flip": 1.5}, "data.augment.flip=1.5 is out of range: use a number from 0 .* to 1$"),
        ({"flip": True}, "data.augment.flip=True is out of range"),
        ({"hue": 0.51}, "data.augment.hue=0.51 is out of range: .* to 0.5$"),
        ({"blur": -1}, "data.augment.blur=-1 is out of range: .* to 16$"),
        ({"stain": float("nan")}, "data.augment.stain=nan is out of range"),
        ({"contrast": "much"}, "data.augment.contrast=much is out of range"),
        ({"saturation": None}, "data.augment.saturation=None is out of range"),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Augmentation.from_config(given)


def test_colours_of_other_channels_are_refused():
    Augmentation(brightness=1, contrast=1, blur=2).check_channels(5)
    Augmentation(hue=0.1, stain=0.1).check_channels(3)
    with pytest.raises(
        ValueError, match=r"data.augment.hue, data.augment.stain require images of 3"
    ):
        Augmentation(hue=0.1, stain=0.1).check_channels(4)
