from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from spatialdl import export
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
    assert torch.equal(plain.eval()(x), trainer.pipeline.stages[0].eval()(x))
    with safe_open(out, "pt") as file:
        found = {key: json.loads(file.metadata()[key]) for key in ("step", "config", "versions")}
    assert found["step"] == 2
    assert found["config"]["optimizer"]["lr"] == 0.05
    assert found["versions"]["torch"] == torch.__version__
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("average", [True, False])
def test_averaged_weights_have_the_plain_names_too(average, tmp_path, capsys):
    trainer = train(tmp_path / "run", "trainer.max_steps=2", "trainer.ema=0.5")
    out = tmp_path / "model.safetensors"
    export.main([f"ckpt_path={tmp_path / 'run'}", f"out={out}", f"average={average}".lower()])
    assert ("the averaged weights of" in capsys.readouterr().out) == average
    found, stage = load_file(out), trainer.pipeline.stages[0]
    with trainer.update.averaged():
        averages = {name: value.clone() for name, value in stage.state_dict().items()}
    plain = stage.state_dict()
    assert any(not torch.equal(averages[name], plain[name]) for name in plain)
    wanted = averages if average else plain
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ckpt_path=nowhere"], "error: ckpt_path=nowhere is not there"),
        (["ckpt_path=latest"], "error: ckpt_path=latest of which run"),
        (["out=x"], "error: ckpt_path has no value"),
        (["ckpt_path=x", "average=maybe"], "error: average=maybe must be true or false"),
        (["model=x"], "error: there is no key model"),
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
        with pytest.raises(SystemExit, match=r"is damaged: stage-00\.safetensors is not what"):
            export.main([f"ckpt_path={run[0]}", f"out={tmp_path / 'x'}"])
    finally:
        file.write_bytes(content)
    assert not (tmp_path / "x").exists()
    with pytest.raises(SystemExit, match="No such file"):
        export.main([f"ckpt_path={run[0]}", f"out={tmp_path / 'no' / 'x'}"])
