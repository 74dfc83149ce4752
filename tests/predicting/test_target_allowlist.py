from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spatialdl.errors import CheckpointError
from spatialdl.predicting.target_allowlist import builds, check_targets
from spatialdl.training.checkpoints.folder import SEAL, sealed
from tests.predicting.runs import train, write_slide


@pytest.mark.parametrize(
    "name",
    [
        *("spatialdl.models.resnet18", "spatialdl.models.unet", "spatialdl.models.wide_view"),
        *("spatialdl.models.amoebanet_d", "spatialdl.models.resnet110_v2"),
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
        *("hydra.utils.get_method", "tests.predicting.runs.train", "spatialdl.models..unet"),
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


def test_a_checkpoint_cannot_run_a_program(tmp_path):
    """Regression: any callable named in its configuration was called."""
    run, done = train(tmp_path / "run", "model.width=4"), tmp_path / "done"
    (file,) = run.glob("checkpoints/step-*/checkpoint.json")
    content = json.loads(file.read_text())
    content["config"]["model"] = {"_target_": "os.mkdir", "path": str(done)}
    del content[SEAL]
    file.write_text(sealed(content))  # anybody can
    slide = write_slide(tmp_path / "a.tif", 64, 64)
    words = [f"ckpt_path={run}", f"slides={slide}", "mpp=0.5", "slide_mpp=0.5", "device=cpu"]
    command = [sys.executable, "-m", "spatialdl.predict", *words]
    command.append(f"hydra.run.dir={tmp_path / 'out'}")
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "if you trust it and the checkpoint's source, add trust=[os.mkdir]" in told.stderr
    assert not done.exists()
