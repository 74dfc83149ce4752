from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.world import as_communicator


@pytest.fixture
def switched_on():
    before = check.enabled()
    check.enable()
    yield
    check.enable(before)


texts = st.text("a z'ä€🙂", max_size=300)


@given(texts)
def test_a_message_has_a_fixed_length_and_gives_the_text_back(text):
    message = check.encode(text)
    assert len(message) == check.TEXT_BYTES
    if len(text.encode()) <= check.TEXT_BYTES:
        assert check.decode(message) == text


def test_a_text_cut_within_a_letter_is_still_readable():
    text = "a" * (check.TEXT_BYTES - 1) + "ä"
    assert check.decode(check.encode(text)).startswith("a" * (check.TEXT_BYTES - 1))


def test_one_rank_agrees_with_itself(switched_on):
    assert check.enabled()
    check.agree(as_communicator(MPI.COMM_SELF), "conv2d forward")


def test_switched_off_it_says_nothing(monkeypatch):
    monkeypatch.setattr(check._Switch, "on", False)
    check.agree(None, "no communicator is asked")
