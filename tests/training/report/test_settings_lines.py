from __future__ import annotations

from spatialdl.training.report.settings_lines import settings_lines


def test_lines_are_yaml_with_what_was_changed():
    config = {"parallel": {"name": "sp", "grid": [2, 1]}, "seed": 0, "weights": None, "data": {}}
    overrides = ["parallel=sp", "++parallel.grid=[2,1]", "~weights", "data/augment=none"]
    assert [tuple(line) for line in settings_lines(config, overrides)] == [
        ("parallel:", "parallel=sp"),
        ("  name: sp", ""),
        ("  grid: [2, 1]", "parallel.grid=[2,1]"),
        ("seed: 0", ""),
        ("weights: null", "~weights"),
        ("data: {}", ""),
    ]
