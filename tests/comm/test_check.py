from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.check import CommCall
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


def test_switched_off_one_rank_remembers_nothing(monkeypatch):
    monkeypatch.setattr(check._Switch, "on", False)
    before = check.last_calls()
    check.agree(as_communicator(MPI.COMM_SELF), "conv2d forward")
    assert check.last_calls() == before


def test_where_ranks_have_parted_follows_from_what_they_did_last():
    both = [CommCall("0-1/0", 7, "conv2d forward"), CommCall("0-1/1", 7, "gradients")]
    ahead = [*both, CommCall("0-1/0", 8, "sum"), CommCall("0-1/0", 9, "conv2d forward")]
    other = [*both, CommCall("0-1/0", 8, "batch_norm")]
    assert check.first_mismatch({0: ahead, 1: both}) == ""
    assert check.first_mismatch({}) == ""
    said = check.first_mismatch({1: other, 0: ahead})
    assert "rank 0 is at 'sum', rank 1 at 'batch_norm'" in said
