"""Damaged and foreign checkpoints; several ranks are in tests/mpi/training."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import CONTENT, RANDOM, stage_file
from spatialdl.training.checkpoints.reading import (
    FORMAT,
    Checkpoint,
    content_of,
    damages,
    first_whole,
)
from tests.training.checkpoints.runs import TENSORS, made


def test_what_is_in_it(tmp_path):
    with Checkpoint(made(tmp_path)) as found:
        assert found.names("") == ["0.weight", "1.steps"]
        assert found.names("1.") == ["1.steps"]
        assert (found.shape("0.weight"), found.shape("1.steps")) == ((4, 3), ())
        assert found.shape("2.weight") is None
        assert found.elements() == 13
        assert torch.equal(found.read("0.weight"), TENSORS["0.weight"])
        assert torch.equal(found.read("0.weight", slice(1, 3)), TENSORS["0.weight"][1:3])


def test_every_rank_has_its_own_random_states(tmp_path):
    with Checkpoint(made(tmp_path)) as found:
        for place in (0, 1, 10, 11):
            (state,) = found.random_states(place).items()
            assert state[0] == "torch"
            assert state[1].tolist() == [place, place]
        assert found.random_states(5) == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"step": 4}, "its step is not that of the folder"),
        ({"format": FORMAT + 1}, r"has version 3, .*reads 2: .*wrote it .*1\.2\.3"),
        ({"files": []}, "files"),
        ({"files": {"../stage-00.safetensors": {}}}, "is not a file name of a checkpoint"),
        ({"files__stage-00.safetensors__bytes": -1}, "bytes"),
        ({"update__scheduler_steps": 9}, "scheduler_steps is 9, more than step"),
        ({"update__scaler": {"scale": 0, "steps": 1}}, "scale"),
        ({"layout__placement": None}, "placement"),
        ({"config": "none"}, "config"),
    ],
    ids=str,
)
def test_one_that_does_not_say_what_a_run_needs_is_refused(changes, sentence, tmp_path):
    path = made(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        content_of(path)
    assert len(damages(path, SingleProcess())) == 1


def test_a_changed_word_is_seen(tmp_path):
    path = made(tmp_path)
    content = json.loads((path / CONTENT).read_text())
    content["layout"]["parallel"] = "sp"
    (path / CONTENT).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="SHA-256 mismatch"):
        content_of(path)


def test_all_damages_are_told(tmp_path):
    path = made(tmp_path)
    (path / RANDOM).unlink()
    file = path / stage_file(0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor: the header is whole
    file.write_bytes(content)
    missing, differs = damages(path, SingleProcess())
    assert differs == "stage-00.safetensors was changed (SHA-256 mismatch)"
    assert RANDOM in missing
    file.write_bytes(content[:50])
    with pytest.raises(CheckpointError, match=r"stage-00\.safetensors: "):
        Checkpoint(path)


def test_the_first_that_is_whole_is_taken(tmp_path, caplog):
    paths = [made(tmp_path, step) for step in (9, 6, 3)]
    assert first_whole(paths, SingleProcess()) == paths[0]
    for path in paths[:2]:
        (path / RANDOM).unlink()
    with caplog.at_level(logging.WARNING):
        assert first_whole(paths, SingleProcess()) == paths[2]
    assert [record.args[2] for record in caplog.records] == [path.name for path in paths[1:]]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        first_whole([], SingleProcess())
