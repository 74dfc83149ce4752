from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from spatialdl import export
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.configuring.own_keys import fit_model_keys
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.inference.predicting.inputs import shard_inputs
from spatialdl.inference.predicting.running import Runner
from spatialdl.inference.predicting.trained import find_trained
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.inference.predicting import runs
from tests.mpi.training.small import small
from tests.training.checkpoints.runs import network, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return path, train(path, "trainer.max_steps=2")


def test_the_plain_network_loads_what_was_trained(run, tmp_path, capsys):
    path, trainer = run
    out = tmp_path / "model.safetensors"
    export.main([f"ckpt_path={path}", f"out={out}"])
    assert capsys.readouterr().out.startswith(f"{out}: the weights of {path}/checkpoints/step-000")
    plain = network().double()
    plain.load_state_dict(load_file(out), strict=True)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    assert torch.equal(plain.eval()(x), trainer.parts.pipeline.stages[0].eval()(x))
    with safe_open(out, "pt") as file:
        found = {key: json.loads(file.metadata()[key]) for key in ("step", "config", "versions")}
    assert found["step"] == 2
    assert found["config"]["optimizer"]["lr"] == 0.05
    assert found["versions"]["torch"] == torch.__version__
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["model.json", "model.safetensors"]
    card = json.loads((tmp_path / "model.json").read_text())
    assert (card["task"], card["step"], card["channels"]) == ("classification", 2, 3)
    assert card["input"]["mean"] == [0.5] * 3
    assert (card["input"]["scale"], card["input"]["dtype"]) == (255, "uint8")
    assert card["model"] == found["config"]["model"]
    assert len(card["classes"]) == found["config"]["data"]["num_classes"]


def test_averaged_weights_have_the_plain_names_too(tmp_path, capsys):
    trainer = train(tmp_path / "run", "trainer.max_steps=2", "trainer.ema=0.5")
    stage = trainer.parts.pipeline.stages[0]
    with trainer.parts.update.averaged():
        averages = {name: value.clone() for name, value in stage.state_dict().items()}
    plain = stage.state_dict()
    assert any(not torch.equal(averages[name], plain[name]) for name in plain)
    for average, wanted in (("true", averages), ("false", plain)):
        out = tmp_path / f"{average}.safetensors"
        export.main([f"ckpt_path={tmp_path / 'run'}", f"out={out}", f"average={average}"])
        assert ("the averaged weights of" in capsys.readouterr().out) == (average == "true")
        found = load_file(out)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ckpt_path=nowhere"], "error: ckpt_path=nowhere does not exist"),
        (["ckpt_path=latest"], "error: ckpt_path=latest names no run"),
        (["out=x"], "error: ckpt_path has no value"),
        (["ckpt_path=x", "average=maybe"], "error: average=maybe must be true or false"),
        (["model=x"], "error: unknown key model"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=sentence):
        export.main(words)


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    (file,) = Path(run[0]).glob("checkpoints/*/stage-00.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(SystemExit, match=r"is damaged: stage-00\.safetensors was changed"):
            export.main([f"ckpt_path={run[0]}", f"out={tmp_path / 'x'}"])
    finally:
        file.write_bytes(content)
    assert not (tmp_path / "x").exists()
    with pytest.raises(SystemExit, match="No such file"):
        export.main([f"ckpt_path={run[0]}", f"out={tmp_path / 'no' / 'x'}"])


def twelve_bits(folder: Path, samples: int = 6) -> np.ndarray:
    """Images of a camera of 12 bits, as a data set; the same as one array."""
    images = np.random.default_rng(0).integers(0, 4096, (samples, 32, 32, 3), np.uint16)
    with ShardWriter(folder, ["a", "b", "c"]) as writer:
        for number, image in enumerate(images):
            writer.add(image, number % 3, "train")
    return images


def test_others_normalise_as_the_metadata_says(tmp_path):
    images = twelve_bits(tmp_path / "set")
    data = [f"data.path={tmp_path / 'set'}", "data.batch_size=2", "data.image_size=[32,32]"]
    numbers = ["data.mean=dataset", "data.std=dataset", "data.scale=4095"]
    run = runs.train(tmp_path / "run", *runs.NETWORK, data=["data=shards", *data, *numbers])
    out = tmp_path / "model.safetensors"
    export.main([f"ckpt_path={run}", f"out={out}"])
    with safe_open(out, "np") as file:
        mean, std, scale = (json.loads(file.metadata()[key]) for key in ("mean", "std", "scale"))
    wanted = [(images / 4095).mean((0, 1, 2)), (images / 4095).std((0, 1, 2))]
    assert np.allclose([mean, std], wanted, rtol=1e-12, atol=0)
    assert scale == 4095
    card = json.loads(out.with_suffix(".json").read_text())
    assert card["classes"] == ["a", "b", "c"]
    assert card["input"] == {"mean": mean, "std": std, "scale": scale, "dtype": "uint16"}
    plain = small(3, 3).double().eval()
    plain.load_state_dict(load_file(out))
    x = torch.from_numpy((images / scale - mean) / std).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = plain(x).softmax(1)
    config = runs.command(f"ckpt_path={run}", f"shards={tmp_path / 'set'}")
    (given,) = shard_inputs(ShardDataset(tmp_path / "set"), (32, 32), maps=False)
    found = Runner(find_trained(str(run), SingleProcess()), config, SingleProcess()).run(given)
    assert torch.allclose(found.values, expected, rtol=0, atol=1e-12)


class Wide(nn.Module):
    """It has arguments that those of ``model=resnet18`` have, too."""

    def __init__(self, num_classes: int = 1000, width: int = 5) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, width, 3), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def test_the_file_fits_a_network_of_the_users_as_it_is_built_elsewhere(tmp_path):
    target = f"++model._target_={__name__}.Wide"
    config = composed("train", *f"{target} {' '.join(runs.SYNTHETIC)} trainer.max_steps=1".split())
    fit_model_keys(config, [target])
    fit(Trainer(config, SingleProcess()), tmp_path / "run")
    out = tmp_path / "model.safetensors"
    export.main([f"ckpt_path={tmp_path / 'run'}", f"out={out}"])
    Wide(3).load_state_dict(load_file(out), strict=True)
    with safe_open(out, "pt") as file:
        recorded = json.loads(file.metadata()["config"])["model"]
    assert recorded == {"_target_": f"{__name__}.Wide", "num_classes": 3}
