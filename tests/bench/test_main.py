from __future__ import annotations

import sys

import pytest

from spatialdl.bench.__main__ import BENCHES, main


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), ([], 2), (["haloo"], "\nerror: unknown benchmark haloo")]
)
def test_every_benchmark_is_told_with_what_it_measures(words, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHES)
    assert all(len(line.split()) > 5 for line in lines)
