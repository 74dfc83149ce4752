"""Every slide is claimed exactly once."""

from __future__ import annotations

import pickle

from spatialdl.features.claims import new_claims


def test_workers_take_every_slide_once(tmp_path):
    first = new_claims(tmp_path, 5)
    second = pickle.loads(pickle.dumps(first))
    assert [first.take(), second.take(), second.take(), first.take()] == [0, 1, 2, 3]
    assert (second.take(), first.take(), second.take()) == (4, None, None)
    assert first.taken() == 5
    (tmp_path / ".claims-left").mkdir()
    new_claims(tmp_path, 1).remove()
    assert list(tmp_path.iterdir()) == []
