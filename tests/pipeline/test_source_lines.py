from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import nn

from spatialdl.models import resnet18, unet
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.source_lines import is_library, users_line, users_line_of


def here() -> str:
    return f"{__file__}:{inspect.currentframe().f_back.f_lineno}"


def test_the_innermost_line_that_is_the_users():
    assert users_line() == here()
    found = []
    layer = nn.Identity()
    layer.register_forward_hook(lambda *_: found.append(users_line(inspect.currentframe().f_back)))
    layer(torch.ones(1)), found.append(here())
    assert found[0] == found[1]


def test_an_error_is_the_users_where_the_user_called():
    try:
        torch.ones(2).view(3), here()
    except RuntimeError as error:
        where = users_line_of(error)
    assert where.startswith(f"{__file__}:")
    lines = Path(__file__).read_text().splitlines()
    assert "view(3)" in lines[int(where.rpartition(":")[2]) - 1]


def test_steps_know_where_they_were_called():
    recording = Forward(unet(width=2, depth=1), (3, 32, 32)).of(2, training=True)
    assert len(recording.steps) > 3
    assert all("models/unet.py:" in step.where for step in recording.steps)


def test_what_a_chain_calls_has_no_line():
    recording = Forward(nn.Sequential(nn.ReLU(), nn.Tanh()), (3, 32, 32)).of(2, training=True)
    assert [step.where for step in recording.steps] == ["", ""]


def test_models_that_come_along_are_nobodys_library():
    assert is_library(torch.__file__.replace("__init__", "functional"))
    assert is_library(inspect.getsourcefile(Forward))
    assert not is_library(inspect.getsourcefile(resnet18))
    assert not is_library(__file__)
