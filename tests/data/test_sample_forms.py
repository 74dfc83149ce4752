from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from spatialdl.data.sample_forms import SampleForm

IMAGE = torch.arange(24, dtype=torch.float32).view(2, 3, 4)


def test_images_of_all_kinds_have_their_channels_last():
    form = SampleForm()
    assert np.array_equal(form.pixels(IMAGE), IMAGE.permute(1, 2, 0).numpy())
    array = IMAGE.numpy()  # (rows, columns, channels), as it is an array
    assert np.array_equal(form.pixels(array), array)
    first = SampleForm(channel_dim="first")
    assert np.array_equal(first.pixels(array), form.pixels(IMAGE))
    assert form.pixels(IMAGE[0]).shape == (3, 4, 1)
    assert form.pixels(torch.zeros(2, 5, 6, 7)).shape == (5, 6, 7, 2)
    assert SampleForm(dims=3).pixels(np.zeros((5, 6, 7))).shape == (5, 6, 7, 1)
    assert SampleForm(dims=1).pixels(torch.zeros(2, 9)).shape == (9, 2)


def test_bytes_of_the_other_order_are_turned():
    assert SampleForm().pixels(np.ones((3, 4), ">u2")).dtype == np.dtype("<u2")


@pytest.mark.parametrize(
    ("mode", "channels", "dtype"),
    [
        *(("RGB", 3, "uint8"), ("L", 1, "uint8"), ("RGBA", 4, "uint8"), ("1", 1, "uint8")),
        *(("P", 3, "uint8"), ("CMYK", 3, "uint8"), ("F", 1, "float32"), ("I;16", 1, "uint16")),
    ],
)
def test_pictures_of_pillow(mode, channels, dtype):
    picture = Image.new("L" if mode == "I;16" else "RGB", (5, 4), 255 if mode == "I;16" else "red")
    pixels = SampleForm().pixels(picture.convert(mode))
    assert (pixels.shape, pixels.dtype) == ((4, 5, channels), dtype)


def test_pairs_and_dicts():
    form, masks = SampleForm(), SampleForm("segmentation")
    assert form.parts((IMAGE, 1)) == (IMAGE, 1)
    assert form.parts([IMAGE, 1]) == (IMAGE, 1)
    assert form.parts({"img": IMAGE, "labels": 1, "path": "x"}) == (IMAGE, 1)
    assert form.parts([{"image": IMAGE, "label": 1}]) == (IMAGE, 1)
    both = {"image": IMAGE, "label": 1, "mask": 2}
    assert (form.parts(both)[1], masks.parts(both)[1]) == (1, 2)
    assert SampleForm(keys=("mask", "label")).parts(both) == (2, 1)
    assert SampleForm(keys=(2, 0)).parts((5, 6, 7)) == (7, 5)


def test_classes_and_numbers():
    form = SampleForm()
    for given in (2, np.int16(2), torch.tensor(2), torch.tensor([2]), np.array([[2]])):
        target = form.decoded((IMAGE, given)).target
        assert (target.shape, target.dtype, int(target)) == ((), np.int64, 2)
    assert int(form.decoded((IMAGE, True)).target) == 1
    several = SampleForm("multilabel").decoded((IMAGE, [1, 0, -1])).target
    assert several[:2].tolist() == [1, 0]
    assert math.isnan(several[2])
    one = SampleForm("regression").decoded((IMAGE, 2.5)).target
    assert (one.tolist(), one.dtype) == ([2.5], np.float64)


def test_masks():
    form, wanted = SampleForm("segmentation"), np.array([[0, 1, 2, 255]] * 3, np.uint8)
    given = [
        *(wanted, torch.from_numpy(wanted), torch.from_numpy(wanted)[None].float()),
        *(wanted[..., None].astype(np.int32), Image.fromarray(wanted)),
    ]
    for mask in given:
        target = form.decoded((IMAGE, mask)).target
        assert target.dtype == np.uint8
        assert np.array_equal(target, wanted)


@pytest.mark.parametrize(
    ("task", "sample", "sentence"),
    [
        ("classification", IMAGE, r"it is a Tensor of shape \(2, 3, 4\), expected \(image, target"),
        ("classification", None, "it is None, expected"),
        ("classification", (IMAGE, 1, 2), r"has 3 parts, .*such as data\.keys=\[0,1\]"),
        (
            "classification",
            {"x": 1},
            r"no image under image, img, .* its keys are x: set data\.keys=",
        ),
        ("classification", {"image": IMAGE, "y": 1}, "no target under label,"),
        ("classification", [{"image": IMAGE}] * 2, r"list of 2 samples.*num_samples=1"),
        ("classification", ("a.png", 1), "the image is a str, expected a tensor"),
        (
            "classification",
            (torch.zeros(3, 4, dtype=torch.int64), 1),
            "image has type int64.*uint16",
        ),
        ("classification", (torch.zeros(3, 4, dtype=torch.bfloat16), 1), "type bfloat16"),
        ("classification", (torch.zeros(3), 1), "expected 2 spatial dims"),
        ("classification", (torch.zeros(3, 0, 4), 1), "has shape"),
        ("classification", (torch.zeros(20, 20, 3), 1), r"a tensor.*set data\.channel_dim=last"),
        ("classification", (np.zeros((3, 20, 20)), 1), r"an array.*set data\.channel_dim=first"),
        ("classification", (IMAGE, [0, 1]), r"target has shape \(2,\).*argmax of a one-hot"),
        ("classification", (IMAGE, 1.5), "target is .*1.5.*a whole number from 0"),
        ("classification", (IMAGE, "cat"), r"the target is a str \('cat'\)"),
        ("multilabel", (IMAGE, [0, 2]), "has the value 2, task=multilabel takes 1 .*0"),
        ("regression", (IMAGE, [math.inf]), "infinite values: mark unknown values with NaN"),
        ("regression", (IMAGE, np.ones((1, 1))), "takes a vector of numbers"),
        ("regression", (IMAGE, []), "expected numbers"),
        ("segmentation", (IMAGE, torch.zeros(2, 3, 4)), "which is 2 channels.*argmax"),
        ("segmentation", (IMAGE, torch.full((3, 4), 0.5)), "non-integer values"),
        ("segmentation", (IMAGE, torch.full((3, 4), -1)), "values, down to -1: mark .* with 255"),
        ("segmentation", (IMAGE, torch.zeros(4, 4)), r"mask has shape \(4, 4\), its image has 3 x"),
        ("segmentation", (IMAGE, 1), "the mask is a int, expected a tensor"),
    ],
)
def test_what_has_no_form_is_refused(task, sample, sentence):
    with pytest.raises(ValueError, match=sentence):
        SampleForm(task).decoded(sample)


def test_channels_that_are_many_may_be_meant():
    assert SampleForm(channel_dim="first").pixels(torch.zeros(20, 20, 3)).shape == (20, 3, 20)
