from __future__ import annotations

import numpy as np
import pytest
from omegaconf import OmegaConf

from spatialdl.data.normalisation import Normalisation


def of(**given: object) -> Normalisation:
    return Normalisation.from_config(OmegaConf.create(given))


def test_the_defaults_are_those_of_checkpoints_without_the_keys():
    assert of() == Normalisation() == of(mean=0.5, std=0.25, scale=None)
    assert (Normalisation().mean, Normalisation().std) == ((0.5,), (0.25,))


def test_numbers_lists_and_names():
    assert of(mean=[0, 0.5], std=1).by_channel(2) == ([0.0, 0.5], [1.0, 1.0])
    named = of(mean="imagenet", std="imagenet")
    assert named == of(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"std": 0}, r"data\.std=0 must be above 0"),
        ({"std": [0.2, -1.0]}, r"data\.std=\[0\.2,-1\] must be above 0"),
        ({"mean": float("nan")}, r"data\.mean=nan must be a finite number"),
        ({"std": [0.2, float("inf")]}, r"data\.std=\[0\.2,inf\] must be a finite number"),
        ({"mean": []}, r"data\.mean=\[\] must be a finite number"),
        ({"mean": None}, r"data\.mean=None must be a finite number"),
        ({"mean": True}, r"data\.mean=True must be a finite number"),
        ({"mean": [0.1, "a"]}, r"data\.mean=\[0\.1,a\] must be a finite number"),
        ({"mean": [[0.1]]}, r"data\.mean=.* must be a finite number"),
        ({"mean": {"r": 1}}, r"data\.mean=.* must be a finite number"),
        (
            {"mean": "cifar", "std": "cifar"},
            r"data\.mean=cifar is unknown: take imagenet, openai_clip, dataset, a num",
        ),
        ({"mean": "imagenet"}, r"data\.mean=imagenet with data\.std=0\.25: set data\.std=imagenet"),
        ({"std": "imagenet"}, r"data\.std=imagenet with data\.mean=0\.5: set data\.mean=imagenet"),
        *(
            ({"scale": wrong}, r"data\.scale=.* must be a number above 0")
            for wrong in (0, -1, float("inf"), float("nan"), "12bit", True, [4095])
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        of(**given)


def test_clip_has_a_name_too():
    assert of(mean="openai_clip", std="openai_clip").mean[0] == 0.48145466


def test_those_of_the_images_are_for_shards():
    of(name="shards", mean="dataset", std="dataset")
    with pytest.raises(
        ValueError, match=r"data\.mean=dataset with data\.std=0\.1: set data\.std=d"
    ):
        of(name="shards", mean="dataset", std=0.1)
    with pytest.raises(ValueError, match="requires data=shards, not data=synthetic"):
        of(name="synthetic", mean="dataset", std="dataset")


def test_signed_pixels_may_have_a_mean_below_0():
    of(mean=-0.3, std=1.4, scale=1000).check_pixels(np.dtype("int16"))


def test_there_is_a_number_for_every_channel():
    for fits in (of(), of(mean=[0.1, 0.2]), of(mean=[0.1], std=[0.3, 0.4])):
        fits.check_channels(2)
    for key in ("mean", "std"):
        with pytest.raises(ValueError, match=rf"data\.{key} has 2 numbers, \[0.1,0.2\].* 3 chann"):
            of(**{key: [0.1, 0.2]}).check_channels(3)
    with pytest.raises(ValueError, match=r"has 3 numbers.*the images have 1 channels"):
        of(mean="imagenet", std="imagenet").check_channels(1)


@pytest.mark.parametrize(
    ("dtype", "given", "sentence"),
    [
        ("uint8", {"scale": 4095}, r"data\.scale=4095 is not a value of uint8 images: .* 1 to 255"),
        ("uint16", {"scale": 0.5}, r"data\.scale=0\.5 is not a value of uint16 images"),
        ("uint8", {"mean": [123.7, 116.3, 103.5]}, r"data\.mean=\[123\.7,.* \(255\), so divide"),
        ("uint8", {"std": 58.4}, r"data\.std=58\.4 must lie between 0 and 1 for uint8 images"),
        ("uint16", {"mean": -0.1}, r"data\.mean=-0\.1 must lie between 0 and 1 for uint16"),
    ],
)
def test_numbers_in_units_of_integer_pixels_are_refused(dtype, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        of(**given).check_pixels(np.dtype(dtype))
    if "scale" not in given:
        of(**given).check_pixels(np.dtype("float32"))  # which may have any values


def test_it_is_recorded_in_numbers():
    found = of(mean=[0.1, 0.2], scale=4095).described(2, np.dtype("uint16"))
    assert found == {"mean": [0.1, 0.2], "std": [0.25] * 2, "scale": 4095, "dtype": "uint16"}
    scales = {name: of().described(1, np.dtype(name))["scale"] for name in ("uint8", "uint16")}
    assert scales == {"uint8": 255, "uint16": 65535}
    assert of().described(1, np.dtype("float32"))["scale"] == 1
    assert of().described(1, None) == {"mean": [0.5], "std": [0.25], "scale": None, "dtype": None}


def test_one_line_says_it():
    text = of(mean="imagenet", std="imagenet").text(np.dtype("uint8"))
    assert text == (
        "input: uint8 pixels / 255, then (x - [0.485,0.456,0.406]) / [0.229,0.224,0.225]"
    )
    assert of(scale=4095).text(np.dtype("uint16")) == (
        "input: uint16 pixels / 4095, then (x - 0.5) / 0.25"
    )
