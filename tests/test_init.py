"""The package's own names: all there, and cheap until one is used."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import spatialdl
from spatialdl.__main__ import MODULES, SCRIPTS
from tests.processes import printed
from tests.vision import need_timm


def test_importing_brings_neither_pytorch_nor_mpi(tmp_path):
    """Nor does what the process that starts the ranks asks before it does."""
    modules = "spatialdl.train, spatialdl.training.layouts, spatialdl.comm.waiting"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = printed([sys.executable, "-c", code], tmp_path).split()
    assert not {"torch", "mpi4py.MPI", "h5py", "numpy"} & set(loaded)


def test_every_name_is_there():
    names: dict[str, object] = {}
    exec("from spatialdl import *", names)
    for name in spatialdl.__all__:
        value = getattr(spatialdl, name)
        assert getattr(value, "__name__", name) == name
        assert names[name] is value
        assert name in dir(spatialdl)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'spatialdl' has no attribute 'shrad'"):
        spatialdl.shrad  # noqa: B018
    with pytest.raises(ImportError, match="shrad"):
        exec("from spatialdl import shrad", {})


def test_a_clone_beside_a_script_is_not_taken_for_the_package(tmp_path: Path) -> None:
    """An installation that can be edited once gave way to any folder of its name."""
    (tmp_path / "spatialdl").mkdir()
    (tmp_path / "script.py").write_text("import spatialdl; spatialdl.__all__")
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "script.py"]
    subprocess.run(command, cwd=tmp_path, env=installed, check=True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, "  train     train a network on images split over ranks\n"),
        (["traim"], 1, "error: command traim is unknown; nearest: train; `python -m spatialdl` li"),
        (["spatialdl-tile", "--help"], 0, "usage: spatialdl-tile [-h] --out DIR"),
        (["train", "data.bach_size=3"], 1, "error: data.bach_size is unknown; nearest: data.batch"),
    ],
)
def test_commands_are_listed_and_started_by_name(words, code, said, run_main):
    ended, shown = run_main(partial(runpy.run_module, "spatialdl", run_name="__main__"), *words)
    assert ended == code
    assert said in shown


def test_every_command_in_the_list_is_there():
    """The benchmarks stayed in it when they left the package."""
    modules = [*MODULES, *(module for module, _ in SCRIPTS.values())]
    assert [name for name in modules if find_spec(f"spatialdl.{name}") is None] == []


def test_no_gpu_is_visible_here_or_in_subprocesses():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == "-1"
    assert torch.cuda.device_count() == torch.xpu.device_count() == 0


# --- PyPI's torchvision beside a CPU build of PyTorch: timm and torchmetrics can be imported


def test_networks_and_transforms_work_without_the_operators():
    need_timm()
    import timm
    import torchmetrics  # noqa: F401  (which imports torchvision)
    from torchvision.transforms import v2

    network = timm.create_model("resnet18", num_classes=0).eval()
    assert network(torch.rand(1, 3, 32, 32)).shape == (1, 512)
    flipped = v2.RandomHorizontalFlip(1.0)(torch.arange(2.0).view(1, 1, 2))
    assert flipped.flatten().tolist() == [1, 0]
    try:  # where the library fits, there is the operator
        torch.ops.torchvision.nms(torch.rand(2, 4), torch.rand(2), 0.5)
    except NotImplementedError as error:
        assert "Could not run 'torchvision::nms'" in str(error)  # noqa: PT017


def test_where_the_library_can_be_loaded_nothing_is_declared(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", package / "_C.so")
    code = "import spatialdl, torch, torchvision; print(hasattr(torch.ops.torchvision, 'nms'))"
    path = os.pathsep.join(map(str, (tmp_path, *sys.path[1:])))
    assert printed([sys.executable, "-c", code], tmp_path, PYTHONPATH=path) == "False\n"
