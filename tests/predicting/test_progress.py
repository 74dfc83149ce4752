from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from spatialdl.comm.launch import TERMINAL
from spatialdl.predicting import progress
from spatialdl.predicting.inputs import SlideImages
from spatialdl.predicting.progress import ReadInBands, layer_progress
from tests.predicting.runs import write_slide


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")


@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_an_image_that_is_read_in_bands_is_the_same(scale, tmp_path, monkeypatch, terminal, capsys):
    monkeypatch.setattr(progress, "BAND", 32)
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


def test_nothing_is_drawn_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.delenv(TERMINAL, raising=False)
    with layer_progress("a", [nn.ReLU()]):
        pass
    assert capsys.readouterr().err == ""
