"""What the benchmarks share: telling what they found."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def publish(
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
    path: Path,
) -> None:
    """Print the table of a result; write it to `path`.json and its picture to `path`.png."""
    print(table(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, path.with_name(f"{path.name}.png"))
    print(f"\nwritten: {path}.json and .png")


def machine() -> str:
    """What the numbers were taken on."""
    return f"{os.cpu_count()} cores, {cpu_model()}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
