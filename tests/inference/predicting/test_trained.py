"""What a checkpoint says of its network, and what it may have built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl import predict
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.volume_geometry import Geometry
from spatialdl.errors import CheckpointError
from spatialdl.inference.predicting.network import builds, check_targets
from spatialdl.inference.predicting.trained import Trained, find_trained
from spatialdl.training.checkpoints.folder import CONTENT, SEAL, sealed
from tests.inference.predicting.runs import NETWORK, train, write_slide


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("trained") / "run", *NETWORK)


@pytest.fixture
def changed(run, tmp_path):
    """Reads a checkpoint after a change of its content, with updated digests."""
    (path,) = (run / "checkpoints").glob("step-*")
    own = tmp_path / path.name
    own.mkdir()
    for file in path.iterdir():
        (own / file.name).hardlink_to(file)
    content = json.loads((own / CONTENT).read_text())
    (own / CONTENT).unlink()

    def found(**changes: Any) -> Trained:
        for key, value in changes.items():
            inner = content
            *groups, last = key.split("__")
            for group in groups:
                inner = inner[group]
            if value is None and not groups:
                inner.pop(last, None)
            else:
                inner[last] = value
        rest = {key: value for key, value in content.items() if key != SEAL}
        (own / CONTENT).write_text(sealed(rest))
        return find_trained(str(tmp_path / path.name), SingleProcess())

    return found


def test_names_of_classes_are_as_many_as_outputs(changed):
    assert changed(data={"classes": ["a", "b", "c"]}).classes == ("a", "b", "c")
    assert changed(data={"classes": ["a"]}).classes == ("a", "1", "2")
    assert changed(data={"classes": ["a", "b", "c", "d"]}).classes == ("a", "b", "c")


def test_settings_of_the_data(changed):
    found = changed(
        config__data__background=0,
        config__data__image_size=[40, 24],
        data={"kind": "tiles", "made_with": {"mpp": 0.5}},
    )
    assert (found.background, found.image_size) == (0.0, (40, 24))
    assert (found.kind, dict(found.made_with)) == ("tiles", {"mpp": 0.5})


def test_volumes_of_its_training_set(changed):
    geometry = {"orientation": "SAR", "spacing": [[2, 1, 1], [3, 1, 1]]}
    found = changed(config__data__image_size=[9, 40, 24], data={"geometry": geometry})
    assert (found.image_size, found.takes_volumes) == ((9, 40, 24), True)
    assert found.geometry == Geometry("SAR", ((2, 1, 1), (3, 1, 1)))
    assert changed(data={"geometry": None}).geometry == Geometry()


def test_the_normalisation_of_its_input(run, changed):
    found = find_trained(str(run), SingleProcess())
    assert found.normalisation == Normalisation()
    assert found.dtype == np.uint8
    given = {"mean": "imagenet", "std": "imagenet", "scale": 4095}
    data = {"input": {"dtype": "uint16"}}
    found = changed(**{f"config__data__{key}": value for key, value in given.items()}, data=data)
    assert found.normalisation == Normalisation.from_config(given)
    found.check_pixels("a", np.dtype("uint16"))
    sentence = (
        r"a has pixels of uint8, but the network was trained on uint16 with data\.scale=4095: "
    )
    with pytest.raises(ValueError, match=sentence):
        found.check_pixels("a", np.dtype("uint8"))


def test_older_checkpoints_have_the_default_normalisation(run, changed):
    (path,) = (run / "checkpoints").glob("step-*")
    settings = json.loads((path / CONTENT).read_text())["config"]["data"]
    older = {key: settings[key] for key in settings if key not in ("mean", "std", "scale")}
    found = changed(config__data=older, data={"classes": ["a", "b", "c"]})
    assert (found.normalisation, found.dtype) == (Normalisation(), None)
    found.check_pixels("a", np.dtype("uint16"))


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("mean", float("nan")), ("std", [0.2, 0.2]), ("std", 0), ("scale", "all"), ("mean", "clip")],
)
def test_a_normalisation_that_cannot_be_is_refused(changed, key, wrong):
    with pytest.raises(CheckpointError, match=rf"does not record how .*data\.{key}"):
        changed(**{f"config__data__{key}": wrong})


def test_a_checkpoint_that_does_not_say_it_goes_by_the_manifest(changed, tmp_path):
    with ShardWriter(tmp_path / "set", ["x", "y", "z"], made_with={"level": 1}) as writer:
        writer.add(np.zeros((32, 32, 3), np.uint8), 0)
    found = changed(data=None, config__data__path=str(tmp_path / "set"))
    assert (found.classes, found.kind) == (("x", "y", "z"), "tiles")
    assert found.made_with["level"] == 1
    targets = changed(config__data__targets="t.csv")  # whose names are not those of classes
    assert targets.classes == ("0", "1", "2")
    gone = changed(config__data__targets=None, config__data__path=str(tmp_path / "gone"))
    assert gone.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config__data__channels", 0),
        ("config__data__num_classes", 2**21),
        ("config__data__image_size", [32]),
        ("config__data__background", "white"),
        ("config__task__name", 3),
        ("config__task__name", "${oc.env:HOME}"),
        ("config__model___target_", None),
        ("config__trainer__tf32", "yes"),
        ("data", {"classes": [1, 2, 3]}),
        ("data", {"made_with": [1]}),
        ("data", {"geometry": {"orientation": "XYZ", "spacing": None}}),
        *(("data", {"geometry": {"orientation": wrong, "spacing": None}}) for wrong in ("RLS", 3)),
        *(
            ("data", {"geometry": {"orientation": None, "spacing": wrong}})
            for wrong in ([[1, 1, 1]], [[1, 1, 1], [1, 1, 0]])
        ),
        *(("data", {"geometry": wrong}) for wrong in ("SAR", {"spacing": None})),
        ("data", {"input": {"dtype": "int7"}}),
    ],
)
def test_what_cannot_be_is_refused(key, value, changed):
    with pytest.raises(CheckpointError, match="does not record how its network is built"):
        changed(**{key: value})


def test_what_a_file_says_is_not_resolved(changed, tmp_path):
    """Variables of the reader's environment came into messages, and folders were made."""
    folder, variable = f"${{new_folder:{tmp_path}/made}}", r"\\${oc.env:HOME}"
    found = changed(config__data__path=folder, config__model__more=variable)
    assert (found.config.data.path, found.config.model.more) == (folder, variable)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("spatialdl.models.resnet18", "spatialdl.models.wide_view"),
        *("spatialdl.models.resnet.BasicBlock", "torch.nn.ReLU", "torch.nn.modules.linear.Linear"),
    ],
)
def test_networks_need_no_word(name):
    assert builds(name)


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "builtins.eval", "torch.load", "torch.hub.load", "subprocess.run", "", "."),
        *("spatialdl.export.main", "spatialdl.models.resnet.torch.hub.load", "spatialdl.modelsx.a"),
        *("spatialdl.models.resnet.nn", "spatialdl.models.resnet.Sequence", "spatialdl.models.no"),
        *("torch.nn.functional.torch", "torch.nn.init.normal_", "torch.nn.modules.module.Tensor"),
        *(
            "hydra.utils.get_method",
            "tests.inference.predicting.runs.train",
            "spatialdl.models..unet",
        ),
    ],
)
def test_other_names_do(name):
    assert not builds(name)


def test_targets_are_found_wherever_they_are():
    for model in (
        {"_target_": "os.system", "command": "true"},
        {"_target_": "spatialdl.models.unet", "width": {"_target_": "os.getpid"}},
        {"_target_": "spatialdl.models.unet", "width": [[{"_target_": "os.getpid"}]]},
    ):
        with pytest.raises(CheckpointError, match=r"trust=\[os\."):
            check_targets(model, ())
        check_targets(model, ["os"])
    with pytest.raises(CheckpointError, match="osx"):
        check_targets({"_target_": "osx.system"}, ["os"])
    with pytest.raises(CheckpointError, match="only plain values"):
        check_targets({"_target_": "spatialdl.models.unet", "width": "${oc.env:HOME}"}, ["os"])


def test_a_checkpoint_cannot_run_a_program(tmp_path, run_main):
    """Regression: any callable named in its configuration was called."""
    run, done = train(tmp_path / "run", "model.width=4"), tmp_path / "done"
    (file,) = run.glob("checkpoints/step-*/checkpoint.json")
    content = json.loads(file.read_text())
    content["config"]["model"] = {"_target_": "os.mkdir", "path": str(done)}
    del content[SEAL]
    file.write_text(sealed(content))  # anybody can
    slide = write_slide(tmp_path / "a.tif", 64, 64)
    words = [f"ckpt_path={run}", f"slides={slide}", "mpp=0.5", "slide_mpp=0.5", "device=cpu"]
    code, said = run_main(predict.main, *words, f"hydra.run.dir={tmp_path / 'out'}")
    assert code == 1
    assert "if you trust it and the checkpoint's source, add trust=[os.mkdir]" in said
    assert not done.exists()
