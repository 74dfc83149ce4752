"""One network and slide in a single process; for layouts see tests/mpi/predicting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from spatialdl.comm.launch import TERMINAL
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.loader import to_input
from spatialdl.errors import SlideError
from spatialdl.inference.predicting import running
from spatialdl.inference.predicting.cutting import cutting_of
from spatialdl.inference.predicting.inputs import Input, SlideImages, slide_input
from spatialdl.inference.predicting.network import Network
from spatialdl.inference.predicting.running import ReadInBands, Runner, SlideOutput, layer_progress
from spatialdl.inference.predicting.trained import find_trained
from spatialdl.slides.reading.reader import Slide
from tests.inference.predicting.runs import MAPS, NETWORK, command, train, write_slide
from tests.mpi.training.small import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("running")
    train(path / "run", *NETWORK, "trainer.ema=0.5")
    write_slide(path / "a.tiff", 203, 187)
    return path


def prepared(folder: Path, *words: str) -> tuple[Input, Runner]:
    run, slide = folder / "run", folder / "a.tiff"
    config = command(f"ckpt_path={run}", f"slides={slide}", "level=0", *words)
    trained = find_trained(str(run), SingleProcess())
    given = slide_input(slide, "a", cutting_of(config, trained))
    return given, Runner(trained, config, SingleProcess())


def predicted(folder: Path, *words: str) -> tuple[Input, SlideOutput]:
    given, runner = prepared(folder, *words)
    return given, runner.run(given)


def turned(images: torch.Tensor, number: int) -> torch.Tensor:
    """One of the eight symmetries of rows and columns."""
    images = images.transpose(-1, -2) if number >= 4 else images
    return images.flip([dim for dim, bit in ((-1, 1), (-2, 2)) if number & bit])


@pytest.mark.parametrize(
    ("words", "count"),
    [("average=true", 1), ("average=false", 1), ("tta=flips", 4), ("average=false tta=d4", 8)],
)
def test_it_is_the_plain_network_on_the_plain_tiles_or_their_turns(folder, words, count):
    given, outcome = predicted(folder, *words.split())
    (file,) = (folder / "run" / "checkpoints").glob("step-00000002/stage-00.safetensors")
    kept = load_file(file)
    plain = small(3, 3).double().eval()
    prefix = "" if "average=false" in words else "average/"
    averaged = [k for k in plain.state_dict() if f"average/{k}" in kept]
    assert not all(torch.equal(kept[f"average/{k}"], kept[k]) for k in averaged)
    plain.load_state_dict({k: kept.get(prefix + k, kept[k]) for k in plain.state_dict()})
    with Slide(folder / "a.tiff") as slide:
        tiles = [slide.read_scaled(x, y, (32, 32), 1.0) for x, y in given.places]
    images = to_input(torch.from_numpy(np.stack(tiles)), torch.float64, torch.device("cpu"))
    with torch.no_grad():
        each = [plain(turned(images, number)).softmax(1) for number in range(count)]
    expected = torch.stack(each).mean(0)
    assert torch.allclose(outcome.values, expected, rtol=0, atol=1e-12)
    assert torch.allclose(each[0], expected, rtol=0, atol=1e-6) == (count == 1)


def test_tiles_that_cannot_be_read_are_left_out(folder):
    given, runner = prepared(folder)
    whole = Slide.read_box

    class Torn(Slide):
        def read_box(self, x, y, *more, **others):
            if (x, y) == given.places[3]:
                raise SlideError("torn")
            return whole(self, x, y, *more, **others)

    given.source.__dict__["_slide"] = Torn(given.slide)
    outcome = runner.run(given)
    others = [number for number in range(len(given.places)) if number != 3]
    assert outcome.kept == others
    expected = predicted(folder)[1].values[others]
    assert torch.allclose(outcome.values, expected, rtol=0, atol=1e-12)

    class Gone(Slide):
        def read_box(self, *more, **others):
            raise SlideError("all of it is torn")

    given.source.__dict__["_slide"] = Gone(given.slide)
    with pytest.raises(SlideError, match="all of it is torn"):
        runner.run(given)


def test_tiles_of_another_size_and_regions(folder):
    given, outcome = predicted(folder, "tile_size=50", "overlap=10", "min_tissue=0.9")
    assert given.size == (50, 50)
    assert len(outcome.values) == len(given.places) > 4
    for words in ("whole=true", "batch_size=5"):  # a region; tiles of several batches
        given, outcome = predicted(folder, words, "activation=true")
        assert len(given.places) == len(outcome.activation)
        assert outcome.activation.shape[1] == 3
        # the mean of what places give to a class is its logit
        logits = torch.from_numpy(outcome.activation).double().mean((2, 3))
        assert torch.allclose(logits.softmax(1), outcome.values, rtol=0, atol=1e-6)
        assert (given.size[0] > 150) == (words == "whole=true") == (len(given.places) == 1)
    assert len(given.places) > 11
    assert float(outcome.values.std(0).min()) > 1e-4


def test_a_network_that_does_not_end_with_a_mean_has_no_activation_maps(folder, tmp_path):
    train(
        tmp_path / "run",
        "++model._target_=tests.inference.predicting.test_running.flat",
        "~model.width",
    )
    write_slide(tmp_path / "a.tiff", 80, 90)
    with pytest.raises(ValueError, match=r"activation=true needs a network .* is not the mean"):
        predicted(tmp_path, "activation=true", "min_tissue=0")
    with pytest.raises(SlideError, match=r"Sequential does not take images of 40x40 .* 32x32"):
        predicted(tmp_path, "tile_size=40", "min_tissue=0")


def test_the_network_sees_the_middle_of_a_tile_as_in_training(folder):
    given, runner = prepared(folder)
    config = command("ckpt_path=x", "slides=x", "level=0")
    trained = find_trained(str(folder / "run"), SingleProcess())
    trained.__dict__["made_with"] = {"tile_size": 44}
    cropped = slide_input(folder / "a.tiff", "a", cutting_of(config, trained))
    assert cropped.size == (32, 32)
    assert cropped.span == (44.0, 44.0)
    centres = [(x - 6, y - 6) for x, y in given.places[:3]]
    cropped = replace(cropped, places=centres)
    cropped.source.places = centres
    cropped.source.__post_init__()
    expected = runner.run(given).values[:3]
    assert torch.allclose(runner.run(cropped).values, expected, rtol=0, atol=1e-12)


def flat(num_classes: int, in_channels: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, 4, 32),
        torch.nn.Flatten(),
        torch.nn.Sigmoid(),
        torch.nn.Linear(4, num_classes),
    )


def test_a_network_that_is_far_larger_than_its_checkpoint_is_not_built(tmp_path):
    run = train(tmp_path / "run", "task=segmentation", *MAPS)
    trained = find_trained(str(run), SingleProcess())
    Network(trained, command("ckpt_path=x"), SingleProcess()).pipeline((32, 32))
    trained.config.model.width = 300  # of which the checkpoint has few
    with pytest.raises(ValueError, match=r"has over [0-9,]+ weights"):
        Network(trained, command("ckpt_path=x"), SingleProcess()).pipeline((32, 32))


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")


@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_an_image_that_is_read_in_bands_is_the_same(scale, tmp_path, monkeypatch, terminal, capsys):
    monkeypatch.setattr(running, "BAND", 32)
    path = write_slide(tmp_path / "a.tiff", 300, 260)
    plain = SlideImages(path, None, [(3, 5)], (151, 137), scale)
    told = ReadInBands(plain, "a")
    assert (told.channels, len(told), told.image_size(0)) == (3, 1, (151, 137))
    for box in (None, (17, 120, 3, 90), (0, 151, 40, 41), (64, 64, 0, 9)):
        assert np.array_equal(told.read(0, box), plain.read(0, box))
    said = capsys.readouterr().err
    assert "a, reading" in said
    assert "/151 " in said


def test_layers_are_followed_and_left_as_they_were(terminal, capsys):
    act = nn.ReLU()  # used twice
    network = nn.Sequential(nn.Linear(2, 2), act, nn.Sequential(nn.Linear(2, 2), act))
    with layer_progress("a", [network]):
        network(torch.ones(1, 2))
    said = capsys.readouterr().err
    assert "a, network" in said
    assert "/3 " in said
    assert not any(one._forward_hooks for one in network.modules())
