"""What a rank says of itself; whole starts of ranks that differ are in test_compare.py."""

from __future__ import annotations

import platform
import sys

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from spatialdl.commands.start import without_hydra
from spatialdl.consistency.rank_state import (
    code,
    configuration,
    prediction_files,
    sum_of_items,
    training_files,
    versions,
)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", job_name="train", version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=True)


def differing(*sets: dict[str, str]) -> set[str]:
    one, other = sets
    return {key for key in {*one, *other} if one.get(key) != other.get(key)}


def test_a_configuration_differs_where_its_keys_do():
    plain = configuration(composed()).items
    assert plain["seed"] == "0"
    assert plain["hydra.run.dir"] == "${new_folder:outputs/${now:%Y-%m-%d_%H-%M-%S}}"
    assert not any(key.startswith("hydra.") for key in {*plain} - {"hydra.run.dir"})
    changed = configuration(composed("seed=1", "data.image_size=[9,8]", "+data.extra={}")).items
    assert differing(plain, changed) == {"seed", "data.image_size", "data.extra"}


def test_what_the_environment_puts_in_differs_unless_it_is_a_place(monkeypatch):
    words = [
        *("seed=${oc.env:HERE}", "optimizer.lr=${seed}", "data.image_size=['${oc.env:HERE}',9]"),
        *("data=shards", "data.path=${oc.env:HERE}", "+data.name_of_run=${hydra:job.num}"),
        *("logger=wandb", "logger.wandb.name=${now:%f}", "logger.wandb.project=${oc.env:HERE}"),
    ]
    found = []
    for value in "12":
        monkeypatch.setenv("HERE", value)
        found.append(configuration(composed(*words)).items)
    assert differing(*found) == {"seed", "optimizer.lr", "data.image_size"}
    assert found[0]["seed"] == "${oc.env:HERE} = 1"
    assert found[0]["data.path"] == "${oc.env:HERE}"


def test_code_is_that_of_the_package_and_of_what_the_configuration_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "sameness_networks.Network"
    config = without_hydra(composed("model=resnet18", f"model._target_={target}"))
    file = tmp_path / "sameness_networks.py"
    assert code(config).items[target].startswith("not importable (No module named")
    file.write_text("__version__ = '3.1'\nclass Network: ...\n")
    before = code(config).items
    assert before["sameness_networks"] == "3.1"
    assert len(before["spatialdl/spatial/conv.py"]) == 12
    file.write_text("class Network:\n    depth = 2\n__version__ = '3.1'\n")
    assert differing(before, code(config).items) == {f"{target} in {file.name}"}
    del sys.modules["sameness_networks"]


def test_code_of_the_configuration_is_compared_though_it_is_behind_a_link_in_a_clone():
    assert "spatialdl/conf/__init__.py" in code(composed()).items


def test_versions_are_those_in_use():
    found = versions().items
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__, "with the build, which metadata may leave out"
    assert found["h5py"] != "missing"


def test_files_are_known_by_what_is_in_them(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")

    def files(name: str) -> dict[str, str]:
        return dict(training_files(composed("data=shards", f"data.path={tmp_path / name}")).items)

    assert files("a") == files("b")
    (tmp_path / "b" / "manifest.json").write_text("{ }")
    assert files("a") != files("b")
    assert files("c") == {"manifest.json of data.path": "not readable (No such file or directory)"}
    assert training_files(composed()).items == {}


def test_a_prediction_has_the_checkpoint_and_the_manifest(tmp_path):
    whole = tmp_path / "run" / "checkpoints" / "step-00000003"
    whole.mkdir(parents=True)
    (whole / "checkpoint.json").write_text("{}")
    (tmp_path / "manifest.json").write_text("{}")
    words = [f"ckpt_path={tmp_path}/run", f"shards={tmp_path}"]
    with initialize_config_module("spatialdl.conf", job_name="predict", version_base="1.3"):
        found = prediction_files(compose("predict", words))
    assert {*found.items} == {"checkpoint.json of ckpt_path", "manifest.json of shards"}
    assert len(set(found.items.values())) == 1


@pytest.mark.parametrize("other", [{}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""}])
def test_a_sum_tells_items_apart(other):
    assert sum_of_items({"a": "1"}) != sum_of_items(other)
    assert sum_of_items({"a": "1", "b": "2"}) == sum_of_items({"b": "2", "a": "1"})


def test_code_that_lists_name_is_compared_too():
    listed = "tests.training.own_callbacks.Recorder"
    config = without_hydra(composed(f"trainer.callbacks=[{{_target_: {listed}}}]"))
    assert f"{listed} in own_callbacks.py" in code(config).items
