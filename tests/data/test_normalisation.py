"""Normalisation: what is given or computed from all pixels, and the input it makes of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter, statistics
from spatialdl.data.loader import to_input
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.statistics import FILE, statistics_of


def of(**given: object) -> Normalisation:
    return Normalisation.from_config(OmegaConf.create(given))


def test_numbers_lists_and_names():
    assert of() == Normalisation() == of(mean=0.5, std=0.25, scale=None)  # of older checkpoints
    assert (Normalisation().mean, Normalisation().std) == ((0.5,), (0.25,))
    assert of(mean=[0, 0.5], std=1).by_channel(2) == ([0.0, 0.5], [1.0, 1.0])
    named = of(mean="imagenet", std="imagenet")
    assert named == of(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    assert of(mean="openai_clip", std="openai_clip").mean[0] == 0.48145466
    of(name="shards", mean="dataset", std="dataset")


FINITE = "must be a finite number"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"std": 0}, r"data\.std=0 must be above 0"),
        ({"mean": float("nan")}, rf"data\.mean=nan {FINITE}"),
        ({"std": [0.2, float("inf")]}, rf"data\.std=\[0\.2,inf\] {FINITE}"),
        *(
            ({"mean": wrong}, rf"data\.mean=.* {FINITE}")
            for wrong in ([], None, True, [0.1, "a"], [[0.1]], {"r": 1})
        ),
        ({"mean": "cifar", "std": "cifar"}, r"mean=cifar is unknown: take imagenet, openai_cl"),
        ({"mean": "imagenet"}, r"data\.mean=imagenet with data\.std=0\.25: set data\.std=imagenet"),
        ({"name": "shards", "mean": "dataset", "std": 0.1}, r"mean=dataset with data\.std=0\.1: s"),
        ({"name": "dataset", "mean": "dataset", "std": "dataset"}, "requires data=shards, not da"),
        *(
            ({"scale": wrong}, r"data\.scale=.* must be a number above 0")
            for wrong in (0, -1, float("inf"), float("nan"), "12bit", True, [4095])
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        of(**given)


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
    of(mean=-0.3, std=1.4, scale=1000).check_pixels(np.dtype("int16"))  # signed ones, too


def test_it_is_recorded_in_numbers_and_one_line_says_it():
    found = of(mean=[0.1, 0.2], scale=4095).described(2, np.dtype("uint16"))
    assert found == {"mean": [0.1, 0.2], "std": [0.25] * 2, "scale": 4095, "dtype": "uint16"}
    for name, scale in (("uint8", 255), ("uint16", 65535), ("float32", 1)):
        assert of().described(1, np.dtype(name))["scale"] == scale
    assert of().described(1, None) == {"mean": [0.5], "std": [0.25], "scale": None, "dtype": None}
    assert of(mean="imagenet", std="imagenet").text(np.dtype("uint8")) == (
        "input: uint8 pixels / 255, then (x - [0.485,0.456,0.406]) / [0.229,0.224,0.225]"
    )
    assert of(scale=4095).text(np.dtype("uint16")) == (
        "input: uint16 pixels / 4095, then (x - 0.5) / 0.25"
    )


@pytest.mark.parametrize("shape", [(2, 5, 4, 3), (2, 4, 5, 6, 3)])
@pytest.mark.parametrize(
    ("dtype", "most", "given"),
    [
        ("uint8", 255, {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}),
        ("uint16", 4095, {"scale": 4095}),
        ("uint16", 65535, {"mean": (0.1, 0.2, 0.3), "std": (0.5,)}),
        ("float32", 1, {"mean": (0.0,), "std": (1.0,)}),
        ("float64", 3000, {"mean": (0.2,), "std": (0.1, 0.2, 0.3), "scale": 3000.0}),
        ("int16", 1, {"mean": (10.0, -20.0, 0.0), "std": (2.0, 3.0, 1.0), "scale": 1.0}),
    ],
)
def test_input_is_normalised_with_channels_first(dtype, most, given, shape):
    random = np.random.default_rng(0)
    values = random.uniform(0, most, shape) if dtype != "int16" else random.normal(0, 999, shape)
    tiles = values.astype(dtype)
    before = tiles.copy()
    normalisation = Normalisation(**given)
    x = to_input(torch.from_numpy(tiles), torch.float64, torch.device("cpu"), normalisation)
    mean, std = (np.array(one) for one in normalisation.by_channel(3))
    wanted = (tiles.astype(np.float64) / most - mean) / std
    assert x.is_contiguous()
    assert np.abs(x.numpy() - np.moveaxis(wanted, -1, 1)).max() < 1e-12
    assert (tiles == before).all()  # they are the loader's own
    if given.get("std") == (1.0,):
        assert (x.numpy() == np.moveaxis(tiles, -1, 1)).all()  # floats as they are


def write(path: Path, dtype: str = "uint8", kind: str = "regions", constant: bool = False):
    draw, pixels = np.random.default_rng(0), []
    with ShardWriter(path, ["a"], kind=kind, overwrite=True) as writer:
        for number, size in enumerate([(7, 5), (11, 13), (4, 9), (6, 6)]):
            shape = (*((3,) if kind == "volumes" else ()), *size, 2)
            image = draw.integers(0, 1000 if dtype == "uint16" else 256, shape).astype(dtype)
            if dtype.startswith("float"):
                image = image + np.array([1e7, 0], dtype)  # what naive sums of squares lose
            if constant:
                image[..., 1] = 3
            split = "val" if number == 3 else "train"
            writer.add(image, 0, split)
            if split == "train":
                pixels.append(image.reshape(-1, 2).astype(np.float64))
    return ShardDataset(path, "train"), np.concatenate(pixels)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("uint8", "regions"), ("uint16", "regions"), ("float64", "volumes")]
)
def test_statistics_are_those_of_all_pixels_of_the_split(dtype, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "_AT_ONCE", 20)
    source, pixels = write(tmp_path / "set", dtype, kind)
    found = statistics_of(source, "train", SingleProcess())
    assert found.mean == pytest.approx(pixels.mean(0), rel=1e-11)
    assert found.std == pytest.approx(pixels.std(0), rel=1e-11)


def test_statistics_are_kept_until_the_manifest_changes(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    source, _ = write(tmp_path / "set")
    found = statistics_of(source, "train", SingleProcess())
    assert "computing mean and std" in caplog.text
    caplog.clear()
    assert statistics_of(source, "train", SingleProcess()) == found
    assert not caplog.text
    whole = statistics_of(ShardDataset(tmp_path / "set"), None, SingleProcess())
    assert whole != found
    kept = json.loads((tmp_path / "set" / FILE).read_text())["splits"]
    assert sorted(kept) == ["", "train"]
    caplog.clear()
    (tmp_path / "set" / FILE).write_text('{"manifest"')
    assert statistics_of(source, "train", SingleProcess()) == found
    assert "computing mean and std" in caplog.text
    other, _ = write(tmp_path / "set", "uint16")

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statistics, "save_json", full)
    assert statistics_of(other, "train", SingleProcess()) != found
    assert "cannot write" in caplog.text


def test_what_cannot_be_divided_by_is_refused(tmp_path):
    source, _ = write(tmp_path / "set", constant=True)
    with pytest.raises(ValueError, match=r"std=dataset: channel 1 of all images .* is constant"):
        statistics_of(source, "train", SingleProcess())
    with ShardWriter(tmp_path / "nan", ["a"]) as writer:
        writer.add(np.full((3, 4, 1), np.nan), 0, "train")
    with pytest.raises(ValueError, match="have NaN or infinite pixels"):
        statistics_of(ShardDataset(tmp_path / "nan", "train"), "train", SingleProcess())
