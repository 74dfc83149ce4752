"""What the benchmarks share."""

from __future__ import annotations

import json

from spatialdl.bench import results


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    path = tmp_path / "new" / "halo-1.5"
    results.publish({"a": 1}, str, lambda result, file: file.touch(), path)
    assert json.loads((tmp_path / "new" / "halo-1.5.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "halo-1.5.png").exists()
    assert "{'a': 1}" in capsys.readouterr().out
