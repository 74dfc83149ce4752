from __future__ import annotations

import json

import pytest
import torch

from spatialdl.data.normalisation import NAMED, Normalisation
from spatialdl.training.network.pretrained_input import expected_input, warn_of_other_input

IMAGENET = NAMED["imagenet"]["mean"], NAMED["imagenet"]["std"]


def test_files_of_torchvision_expect_imagenet(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    file = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    assert expected_input("resnet18", file) == IMAGENET
    warn_of_other_input("resnet18", file, Normalisation(*IMAGENET), 3)
    warn_of_other_input("resnet18", file, Normalisation(), 1)
    assert not caplog.text
    warn_of_other_input("resnet18", file, Normalisation(), 3)
    assert "weights=resnet18 were trained with mean [0.485,0.456,0.406]" in caplog.text
    assert "set data.mean=imagenet data.std=imagenet" in caplog.text


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_configuration_of_timm_says_what_it_expects(wrapped, tmp_path, caplog):
    numbers = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]}
    content = {"architecture": "x", "pretrained_cfg": numbers} if wrapped else numbers
    (tmp_path / "config.json").write_text(json.dumps(content))
    file = tmp_path / "model.safetensors"
    assert expected_input("mine", file) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    warn_of_other_input("mine", file, Normalisation(), 3)
    assert "set data.mean=[0.5,0.4,0.3] data.std=[0.2,0.2,0.1]" in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", '{"mean": 3}', '{"mean": ["a"], "std": [1]}'])
def test_what_nobody_says_is_not_known(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert expected_input("mine", tmp_path / "model.pth") is None
    assert expected_input("timm/resnet18.a1_in1k", tmp_path / "model.pth") == IMAGENET
