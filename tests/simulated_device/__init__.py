"""A simulated accelerator, `sim`: tests of the device path run on it where there is no GPU.

Its memory faults when the host or MPI touches it, its streams are queues that run later in their
own threads, and a block that is freed too early reads as NaN. Operators are run by the CPU's
kernels. It is built by the compiler of this machine when it is first loaded, and kept in PyTorch's
cache of extensions.

Environment, read when it is loaded:
    SIM_DEVICES: how many devices, 2 by default.
    SIM_DELAY_US: the most that a stream waits before each piece of work, 0 by default.
    SIM_SEED: of these random delays.
    SIM_MEMORY_GIB: addresses of a device, 16 by default; pages are taken when they are used.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

FOLDER = Path(__file__).resolve().parent
FLAGS = ["-O1", "-g0", "-fvisibility=hidden", "-Wno-deprecated-declarations"]


def missing() -> str | None:
    """What is missing on this machine to build the device, or None."""
    if not sys.platform.startswith("linux"):
        return f"the simulated accelerator needs Linux, not {sys.platform}"
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"no C++ compiler {cpp_extension.get_cxx_compiler()}"
    with _own_programs():
        if not cpp_extension.is_ninja_available():
            return "no ninja; pip install ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python.h; install the headers of Python"
    return None


@contextlib.contextmanager
def _own_programs() -> Iterator[None]:
    """Programs of this environment are found, ninja among them, though it is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def available() -> bool:
    """Whether the device is loaded, or could be built on this machine."""
    return loaded() or missing() is None


def loaded() -> bool:
    """Whether this process has the device."""
    return torch._C._get_privateuse1_backend_name() == "sim"


def load() -> None:
    """Build the device if need be, and register it as `torch.device("sim")` and `torch.sim`.

    Raises:
        RuntimeError: if it cannot be built here, or does not compile.
    """
    if loaded():
        return
    lacking = missing()
    if lacking is not None:
        raise RuntimeError(f"cannot build the simulated accelerator: {lacking}")
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(_library())

    from tests.simulated_device import collectives, sim

    torch._register_device_module("sim", sim)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    collectives.register()
    atexit.register(torch.ops.sim.end_streams)


def _library() -> Path:
    """The compiled library; processes that need it at the same time compile it once."""
    sources = sorted(FOLDER.glob("*.cpp"))
    digest = hashlib.sha256(repr([torch.__version__, sys.version, FLAGS]).encode())
    for file in [*sources, *sorted(FOLDER.glob("*.h"))]:
        digest.update(file.name.encode() + file.read_bytes())
    name = f"spatialdl_sim_{digest.hexdigest()[:16]}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    library, ready = folder / f"{name}.so", folder / "ready"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            (folder / "lock").unlink(missing_ok=True)  # of a build that was killed
            with _own_programs():
                cpp_extension.load(
                    name,
                    [str(source) for source in sources],
                    extra_cflags=FLAGS,
                    build_directory=str(folder),
                    is_python_module=False,
                )
            ready.touch()
    return library


def python_path(folder: Path) -> str:
    """What ``PYTHONPATH`` is to be for processes that have the device.

    PyTorch loads devices that others have made when it is imported: it asks for entry points of the
    group ``torch.backends``. A folder on ``PYTHONPATH`` with one of them is all that it needs.

    Args:
        folder: an empty one.
    """
    distribution = folder / "spatialdl_simulated_device-0.dist-info"
    distribution.mkdir()
    about = "Metadata-Version: 2.1\nName: spatialdl-simulated-device\nVersion: 0\n"
    (distribution / "METADATA").write_text(about)
    (distribution / "entry_points.txt").write_text(f"[torch.backends]\nsim = {__name__}:load\n")
    return f"{folder}:{FOLDER.parents[1]}"
