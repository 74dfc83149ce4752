from __future__ import annotations

import json
import logging
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.normalisation import NAMED, Normalisation
from spatialdl.models import resnet18
from spatialdl.training.network.weights import (
    check_alike,
    expected_input,
    find_weights,
    load_weights,
    warn_of_other_input,
)


@pytest.fixture
def trained():
    """Weights and statistics that differ from a new network."""
    torch.manual_seed(1)
    model = resnet18(5, width=2)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of torch.hub."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def same(ours: nn.Module, theirs: nn.Module, but: str = "nothing") -> bool:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    return all(one.equal(other) for (name, one), other in pairs if not name.startswith(but))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"epoch": 3, "state_dict": state},
        lambda state: {"state_dict": {f"model.{key}": v for key, v in state.items()}, "lr": 0.1},
        lambda state: {"model": {f"module._orig_mod.{key}": v for key, v in state.items()}},
        lambda state: {k: v for k, v in state.items() if not k.endswith("batches_tracked")},
    ],
)
def test_a_file_loads_whatever_is_around_its_names(trained, tmp_path, wrap):
    torch.save(wrap(trained.state_dict()), tmp_path / "trained.pth")
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    for name in ("trained.pth", "trained.safetensors"):
        model = resnet18(5, width=2)
        load_weights(model, str(tmp_path / name))
        assert same(model, trained)


@pytest.mark.parametrize("classes", [3, None])
def test_a_head_of_another_size_is_left_out_and_said(trained, tmp_path, caplog, classes):
    state = trained.state_dict()
    if classes is None:  # a backbone only
        state = {key: value for key, value in state.items() if not key.startswith("fc.")}
    torch.save(state, tmp_path / "a.pt")
    torch.manual_seed(0)
    model = resnet18(classes or 5, width=2)
    head = model.fc.weight.detach().clone()
    with caplog.at_level(logging.INFO):
        load_weights(model, str(tmp_path / "a.pt"))
    assert same(model, trained, but="fc.")
    assert model.fc.weight.equal(head)
    has = "5x16" if classes else "none"
    assert f"fc.weight is initialised, {classes or 5}x16; the file has {has}" in caplog.text


def test_names_that_do_not_fit_are_listed_with_the_nearest(trained, tmp_path):
    state = trained.state_dict()
    state["layer1.0.convolution1.weight"] = state.pop("layer1.0.conv1.weight")
    torch.save(state, tmp_path / "a.pt")
    sentence = (
        r"missing key layer1.0.conv1.weight \(nearest: layer1.0.convolution1.weight\); unexpected "
        r"key layer1.0.convolution1.weight \(nearest: layer1.0.conv1.weight\)"
    )
    model = resnet18(5, width=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        load_weights(model, str(tmp_path / "a.pt"))
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_other_shapes_than_the_head_s_are_refused(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"conv1.weight is 2x3x7x7 in the file, 2x1x7x7 here"):
        load_weights(resnet18(5, in_channels=1, width=2), str(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match=r"and [0-9]+ more"):
        load_weights(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(2, 5)), str(tmp_path / "a.pt"))


def test_what_is_no_state_dict_is_refused(tmp_path):
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("weights")
        with pytest.raises(ValueError, match=f"cannot read .*{name}"):
            load_weights(resnet18(), str(tmp_path / name))
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    with pytest.raises(ValueError, match=r"epoch.pt is not a state dict, but a dict: epoch"):
        load_weights(resnet18(), str(tmp_path / "epoch.pt"))


class Code:
    def __reduce__(self):
        return sys.exit, (3,)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"conv1.weight": Code()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="must contain only tensors"):
        load_weights(resnet18(), str(tmp_path / "a.pt"))


def test_a_name_is_looked_up_in_the_cache_of_torch_hub(cache):
    file = cache / "resnet18-f37072fd.pth"
    file.touch()
    (cache / "resnet180-0.pth").touch()
    for name in ("resnet18", "resnet18-f37072fd", "resnet18-f37072fd.pth", str(file)):
        assert find_weights(name) == file
    (cache / "resnet18-5c106cde.pth").touch()
    with pytest.raises(ValueError, match=r"resnet18-5c106cde.pth and resnet18-f37072fd.pth;"):
        find_weights("resnet18")


def test_a_repository_is_looked_up_in_the_cache_of_the_hugging_face_hub(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--timm--resnet18.a1_in1k"
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    file = folder / "snapshots/abc/model.safetensors"
    file.touch()
    assert find_weights("timm/resnet18.a1_in1k") == file


@pytest.mark.parametrize(
    "name", ["resnet18", "timm/resnet18.a1_in1k", "nobody/nothing", "no body/-nothing"]
)
def test_what_is_nowhere_is_not_downloaded(cache, tmp_path, name, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=f"weights={re.escape(name)} is not a file.*download it first"
    ):
        find_weights(name)


@pytest.mark.parametrize("name", ["runs/a.pt", "./a.pth", "~/a.safetensors", "../b/a.ckpt"])
def test_a_missing_file_is_said(name):
    with pytest.raises(ValueError, match=f"weights={re.escape(name)}: there is no such file"):
        find_weights(name)


class Other(SingleProcess):
    def allgather(self, obj):
        return [obj, "another"]


def test_ranks_with_other_weights_are_refused():
    model = resnet18(width=1)
    check_alike(model, SingleProcess())
    with pytest.raises(ValueError, match="rank 1 has read other weights than rank 0"):
        check_alike(model, Other())


IMAGENET = NAMED["imagenet"]["mean"], NAMED["imagenet"]["std"]


def test_files_of_torchvision_expect_imagenet(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    file = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    assert expected_input("resnet18", file) == IMAGENET
    warn_of_other_input("resnet18", file, Normalisation(*IMAGENET), 3)
    warn_of_other_input("resnet18", file, Normalisation(), 1)
    assert not caplog.text
    warn_of_other_input("resnet18", file, Normalisation(), 3)
    assert "weights=resnet18 were trained with other means" in caplog.text
    assert "set data.mean=[0.485,0.456,0.406] data.std=[0.229,0.224,0.225]" in caplog.text


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
