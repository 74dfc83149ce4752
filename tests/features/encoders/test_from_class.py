"""User-defined encoders, and errors for invalid ones."""

from __future__ import annotations

import pytest
import torch

from spatialdl.features.encoders.encoder import Wish
from spatialdl.features.encoders.making import make_encoder
from tests.features.tiny import Tiny

TINY = "tests.features.tiny.Tiny"


def test_attributes_and_options_say_what_it_wants():
    encoder = make_encoder(Wish(TINY, arguments={"width": 7}))
    assert encoder.width() == 7
    steps = encoder.preprocessing
    assert (steps.size, steps.mean, steps.std) == (64, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))
    other = make_encoder(Wish(TINY, size=32, std=(1.0, 2.0, 3.0))).preprocessing
    assert (other.size, other.std) == (32, (1.0, 2.0, 3.0))


def test_weights_of_a_file_are_loaded(tmp_path):
    network = Tiny(seed=5)
    torch.save(
        {"state_dict": {**network.state_dict(), "head.weight": torch.zeros(2)}}, tmp_path / "w.pt"
    )
    encoder = make_encoder(Wish(TINY, tmp_path / "w.pt"))
    assert encoder.digest() == type(encoder)(encoder.network, encoder.preprocessing, "").digest()
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(encoder.network(images), network.eval()(images))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet18", {}, "expected timm:NAME"),
        ("no_such_package.Net", {}, "cannot be imported"),
        ("tests.features.tiny.None_", {}, "cannot be imported"),
        ("pathlib.Path", {}, "returns a PosixPath, expected a torch.nn.Module"),
        (TINY, {"depth": 3}, "cannot be made with {'depth': 3}: TypeError"),
        ("tests.features.tiny.Silent", {}, "no attribute mean: add --mean"),
    ],
)
def test_what_is_no_encoder_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_encoder(Wish(name, arguments=arguments))


def test_outputs_that_are_no_features_are_refused():
    with pytest.raises(ValueError, match=r"returns \[1, 12, 8, 8\] for 1 images, expected"):
        make_encoder(Wish("tests.features.tiny.Map")).width()
    with pytest.raises(ValueError, match="does not take images of 4 x 4"):
        make_encoder(Wish(TINY, size=4)).width()
