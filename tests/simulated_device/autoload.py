"""The simulated accelerator in processes that tests start, and in those that these start.

PyTorch loads devices that others have made when it is imported: it asks for entry points of the
group ``torch.backends``. A folder on ``PYTHONPATH`` with one of them is all that a process needs.
"""

from __future__ import annotations

from pathlib import Path

from tests import simulated_device

_NAME = "spatialdl_simulated_device-0.dist-info"
_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: spatialdl-simulated-device\nVersion: 0\n",
    "entry_points.txt": f"[torch.backends]\nsim = {simulated_device.__name__}:load\n",
}


def python_path(folder: Path) -> str:
    """What ``PYTHONPATH`` is to be for processes that have the device.

    Args:
        folder: an empty one.
    """
    distribution = folder / _NAME
    distribution.mkdir()
    for name, text in _FILES.items():
        (distribution / name).write_text(text)
    return f"{folder}:{simulated_device.FOLDER.parents[1]}"
