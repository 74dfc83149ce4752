"""Programs that tests run in a process of their own, for they end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START = """
import ctypes, os, sys, threading
import numpy as np
import torch
from tests import simulated_device
simulated_device.load()
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    """Run lines after the device was loaded.

    Args:
        program: lines of Python; they find torch, numpy as np, ctypes, os, sys and threading.
    """
    return subprocess.run(
        [sys.executable, "-c", START + program],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
