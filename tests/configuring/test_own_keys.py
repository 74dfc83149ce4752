from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from spatialdl.configuring.own_keys import fit_model_keys, rewritten


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model.depth=4", "++model.depth=4"),
        ("model._target_=networks.Own", "++model._target_=networks.Own"),
        ("task.loss.alpha=2", "++task.loss.alpha=2"),
        ("task.loss=mse", "task.loss=mse"),
        ("data.stage=/local", "data.stage.to=/local"),
        ("data.stage={to:/local}", "data.stage={to:/local}"),
        ("data.stage.keep=true", "data.stage.keep=true"),
        ("~model.width", "~model.width"),
        ("experiment=model.x=1", "experiment=model.x=1"),
    ],
)
def test_short_forms_are_written_out(word, meant):
    assert rewritten(word) == meant


def model(target: str):
    return OmegaConf.create({"model": {"_target_": target, "width": 8, "out_features": 2}})


def test_a_network_of_the_user_is_not_given_what_it_does_not_take():
    config = model("torch.nn.Linear")
    fit_model_keys(config, ["++model._target_=torch.nn.Linear", "++model.own=1", "seed=2"])
    assert config.model == {"_target_": "torch.nn.Linear", "out_features": 2}


def test_what_the_user_has_written_stays_for_the_network_to_refuse():
    config = model("torch.nn.Linear")
    fit_model_keys(config, ["model._target_=torch.nn.Linear", "+model.width=8"])
    assert config.model == {"_target_": "torch.nn.Linear", "width": 8, "out_features": 2}


def test_a_network_that_comes_along_is_given_all():
    config = model("nobody.asks")
    fit_model_keys(config, ["model=resnet18", "model.width=8"])
    assert set(config.model) == {"_target_", "width", "out_features"}


def test_a_network_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"model\._target_=nobody\.Knows cannot be imported"):
        fit_model_keys(model("nobody.Knows"), ["model._target_=nobody.Knows"])
