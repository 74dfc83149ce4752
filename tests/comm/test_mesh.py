"""Buckets of the gradient reducer; what ranks make of them is in tests/mpi."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import torch
from mpi4py import MPI
from torch import nn

from spatialdl.comm import gradients
from spatialdl.comm.device_path import (
    choose_device_path,
    device_of,
    device_path,
    reports_device_aware,
)
from spatialdl.comm.gradients import Reducer, Replicated, buckets
from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.mesh import init_mesh
from spatialdl.comm.single_process import SingleProcess
from tests.comm.programs import run


def test_a_world_of_one_is_a_mesh_and_its_process_is_never_ended():
    before = sys.excepthook
    mesh = init_mesh(comm=MPI.COMM_SELF)
    assert sys.excepthook is before
    assert (mesh.grid, mesh.data, mesh.size, mesh.part, mesh.replica) == ((1, 1), 1, 1, 0, 0)
    assert [c.size for c in (mesh.comm, mesh.grid_comm)] == [1, 1]
    assert mesh.box((70, 93)) == (0, 70, 0, 93)


PROGRAM = "import spatialdl; print(spatialdl.init_mesh(grid=(2, 1)).part)"


def test_a_program_without_ranks_says_how_it_is_started_on_them(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "my program.py"])
    wrong = r"data 2 x rows 3 x columns 1 = 6 ranks, .*this world has 1.*mpiexec.* -n 6 "
    with pytest.raises(ValueError, match=wrong):
        init_mesh(grid=(3, 1), data=2)
    with pytest.raises(ValueError, match="start it with") as error:
        init_mesh(grid=(2, 1))
    words = shlex.split(re.search(r"start it with `(.*)`", str(error.value))[1])
    assert words == [*mpiexec_command(2), sys.executable, "my program.py"]


def test_without_an_mpi_a_program_says_how_to_get_one():
    done = run("-c", PROGRAM, MPI4PY_LIBMPI="/no/libmpi.so")
    (last,) = done.stderr.splitlines()[-1:]
    assert last.startswith("spatialdl.errors.MpiNotFound: mpi4py finds no MPI (")
    assert 'pip install "spatialdl[mpi]"' in last
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("grid", [2, (), (1, 1, 1, 1), "2x1"])
def test_a_grid_is_one_to_three_numbers(grid):
    with pytest.raises(ValueError, match=r"a grid has one to three numbers, .*, got"):
        init_mesh(grid)


def test_a_box_takes_a_size_for_each_spatial_dim():
    with pytest.raises(ValueError, match=r"mesh\.box needs a size for each spatial dim: the grid"):
        init_mesh((1, 1)).box((2, 3, 4))
    with pytest.raises(ValueError, match=r"the grid is \(1,\), got 7"):
        init_mesh((1,)).box(7)  # type: ignore[arg-type]


def test_a_module_is_replicated_on_the_grid_and_where_it_is_whole_on_replicas():
    mesh, layer = init_mesh(), nn.Linear(1, 1)
    whole, shards = mesh.replicated(layer), mesh.replicated(layer, sharded=True)
    assert (whole.module, whole.comm, shards.comm) == (layer, mesh.comm, mesh.grid_comm)
    assert ("data" in whole.axes, "data" in shards.axes, whole.lane) == (True, False, None)


MIXED = [torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float32]


def test_buckets_hold_one_type_and_are_full_in_order():
    tensors = [torch.zeros(n, dtype=d) for n, d in zip((3, 1, 1, 2, 4), MIXED, strict=True)]
    tensors += [torch.zeros(2) for _ in range(5)]
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    portions = [[numbers[id(tensor)] for tensor in part] for part in buckets(tensors, 16)]
    assert portions == [[1, 2], [4], [0, 5], [6, 7], [8, 9], [3]], "the fifth is large, and alone"
    assert buckets([], 16) == []


def test_the_last_parameters_are_sent_first_and_one_copy_sends_nothing(monkeypatch):
    sent = []
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    monkeypatch.setattr(
        gradients, "add_over_ranks_", lambda comm, values, name: sent.append(values.numel())
    )
    layers = [nn.Linear(2, 3), nn.Linear(5, 7)]
    for parameter in nn.ModuleList(layers).parameters():
        parameter.grad = torch.ones_like(parameter)
    copies = [Replicated(layer, ("data",), SingleProcess(), 2) for layer in layers[::-1]]
    Reducer(copies).reduce()
    assert sent == [7, 35, 3, 6]
    sent.clear()
    Reducer([Replicated(layers[0], ("data",), SingleProcess(), 1)]).reduce()
    assert sent == []


def test_a_gradient_that_changes_after_it_was_sent_is_refused():
    layer = nn.Linear(2, 1)
    reducer = Reducer([Replicated(layer, ("data",), SingleProcess(), 2, lane=SingleProcess())])
    assert reducer.follow()
    assert not reducer.follow()
    layer(torch.ones(1, 2)).sum().backward()
    reducer.reduce()
    reducer.last_backward(layer)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="in several parts in one backward"):
        layer(torch.ones(1, 2)).sum().backward()


CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@NO_GPU
def test_devices_by_name():
    assert device_of("cpu") == device_of("auto") == CPU
    with pytest.raises(ValueError, match="device=cuda, but PyTorch finds no cuda device"):
        device_of("cuda")


def test_apples_accelerator_is_not_taken(monkeypatch):
    """It has no float64, and no streams of its own."""
    apple = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: apple)
    assert device_of("auto") == CPU


def test_ranks_on_cpus_need_no_path():
    assert choose_device_path(SingleProcess(), CPU) is None
    assert choose_device_path(SingleProcess(), CPU, "nccl") is None
    assert device_path().name == "host"
    with pytest.raises(ValueError, match=r"unknown comm\.device_path=pigeon, .* auto, nccl"):
        choose_device_path(SingleProcess(), CPU, "pigeon")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_an_mpi_library_of_pip_takes_no_device_memory(kind):
    assert not reports_device_aware(torch.device(kind, 0))
