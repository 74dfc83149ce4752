"""Configuration errors reported before ranks start."""

from __future__ import annotations

import pytest

from spatialdl.evaluating.checks import check_evaluation
from spatialdl.training.checkpoints.folder import CONTENT
from tests.evaluating.cases import command, drawn, write_predictions, write_rows


@pytest.fixture
def folder(tmp_path):
    slides, values, truth = drawn()
    write_predictions(tmp_path / "p", slides, values, truth)
    (tmp_path / CONTENT).touch()  # a checkpoint, of which only the place matters here
    write_rows(tmp_path / "labels.csv", ("slide", "label", "site"), [("a", "b", "c")])
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("slides=a.svs", "features do not contain labels: give labels=FILE.csv"),
        ("features=f", "features do not contain labels: give labels=FILE.csv"),
        ("predictions=P slides=a.svs", "predictions=.* and slides=a.svs are exclusive"),
        ("predictions=P ckpt_path=run", "are exclusive"),
        ("predictions=P/..", "slides.csv: give the directory of a run"),
        ("predictions=P parallel=sp", "parallel=sp needs 2 ranks, but evaluating"),
        ("predictions=P bootstrap=-1", "bootstrap=-1 must be a whole number of at least 0"),
        ("predictions=P confidence=95", "confidence=95 must lie between 0 and 1"),
        ("predictions=P aggregation=sum", "aggregation=sum"),
        ("predictions=P subgroups=[site]", "are columns of a table of labels: give labels="),
        ("predictions=P subgroups=site", "must be a list"),
        ("predictions=P labels=L subgroups=[scanner]", "has no column scanner, only slide, label"),
        ("predictions=P labels=nowhere.csv", "cannot read nowhere.csv"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(words, said, folder):
    given = words.replace("=P", f"={folder / 'p'}").replace("=L", f"={folder / 'labels.csv'}")
    asked = given.split() if "predictions" in words else [f"ckpt_path={folder}", *given.split()]
    with pytest.raises(ValueError, match=said):
        check_evaluation(command(*asked))


def test_what_can_be_evaluated_is_not(folder):
    given = [f"predictions={folder / 'p'}", f"labels={folder / 'labels.csv'}", "subgroups=[site]"]
    assert check_evaluation(command(*given)).world_size == 1
    asked = [f"ckpt_path={folder}", f"shards={folder}", "parallel=sp"]
    assert check_evaluation(command(*asked)).world_size == 2
