from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from mpi4py import MPI
from torch import nn

from spatialdl.comm.mesh import dry_mesh, init_mesh, stage_mesh
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement, Position


def test_a_world_of_one_is_a_mesh():
    mesh = init_mesh(comm=MPI.COMM_SELF)
    assert (mesh.grid, mesh.data, mesh.size, mesh.part, mesh.replica) == ((1, 1), 1, 1, 0, 0)
    assert [c.size for c in (mesh.comm, mesh.grid_comm)] == [1, 1]
    assert mesh.box((70, 93)) == (0, 70, 0, 93)


def test_a_grid_that_does_not_fit_names_the_product_and_the_world():
    with pytest.raises(ValueError, match=r"data 2 x rows 3 x columns 1.*world has 1") as error:
        init_mesh(grid=(3, 1), data=2, comm=MPI.COMM_SELF)
    assert "data 2 x rows 3 x columns 1 = 6 ranks" in str(error.value)
    assert "mpiexec -n 6" in str(error.value)


PROGRAM = "import spatialdl; print(spatialdl.init_mesh(grid=(2, 1)).part)"


def test_a_program_without_ranks_says_how_it_is_started_on_them(tmp_path):
    (tmp_path / "my program.py").write_text(PROGRAM)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )

    (last,) = run(sys.executable, "my program.py").stderr.splitlines()[-1:]
    started = run(*shlex.split(re.search(r"start it with `(.*)`", last)[1]))
    assert (started.returncode, sorted(started.stdout.split())) == (0, ["0", "1"])


def test_without_an_mpi_a_program_says_how_to_get_one():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "MPI4PY_LIBMPI": "/no/libmpi.so"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    (last,) = done.stderr.splitlines()[-1:]
    assert last.startswith("spatialdl.errors.MpiNotFound: mpi4py finds no MPI (")
    assert 'pip install "spatialdl[mpi]"' in last
    assert "During handling" not in done.stderr


def test_a_stage_has_the_grid_and_the_ranks_of_the_placement():
    class Ranks:
        """Remembers which subsets were asked for."""

        def subset(self, ranks):
            return list(ranks)

    placement = Placement(2, ((2, 2), (1, 2)), mirrored=True)
    mesh = stage_mesh(placement, Position(1, 1, 0, copy=1), Ranks())
    assert (mesh.grid, mesh.data, mesh.part, mesh.replica) == ((1, 2), 2, 0, 1)
    assert (mesh.comm, mesh.grid_comm) == ([1, 0, 7, 6], [7, 6])


def test_a_dry_mesh_has_the_layouts_of_a_real_one():
    mesh = dry_mesh((2, 3))
    layout = mesh.layout(4, (70, 93))
    assert layout == Layout.even(4, (70, 93), (2, 3))
    assert mesh.own_box(layout) == layout.boxes[0]
    assert (mesh.grid_comm.rank, mesh.grid_comm.size) == (0, 6)
    assert dry_mesh((2, 3), 4).part == 4


@pytest.mark.parametrize("grid", [2, (), (1, 1, 1, 1), "2x1"])
def test_a_grid_is_one_to_three_numbers(grid):
    with pytest.raises(ValueError, match=r"a grid has one to three numbers, .*, got"):
        init_mesh(grid)


@pytest.mark.parametrize(
    ("grid", "size", "box"),
    [
        ((1,), (7,), (0, 7)),
        ((1, 1), (7, 9), (0, 7, 0, 9)),
        ((1, 1, 1), (2, 3, 4), (0, 2, 0, 3, 0, 4)),
    ],
)
def test_a_box_has_two_numbers_for_each_spatial_dim(grid, size, box):
    assert init_mesh(grid).box(size) == box


def test_a_box_takes_a_size_for_each_spatial_dim():
    with pytest.raises(ValueError, match=r"mesh\.box needs a size for each spatial dim: the grid"):
        init_mesh((1, 1)).box((2, 3, 4))
    with pytest.raises(ValueError, match=r"the grid is \(1,\), got 7"):
        init_mesh((1,)).box(7)  # type: ignore[arg-type]


def test_a_module_is_replicated_on_the_grid_and_where_it_is_whole_on_replicas():
    mesh = init_mesh()
    layer = nn.Linear(1, 1)
    whole, shards = mesh.replicated(layer), mesh.replicated(layer, sharded=True)
    assert (whole.module, whole.comm, shards.comm) == (layer, mesh.comm, mesh.grid_comm)
    assert ("data" in whole.axes, "data" in shards.axes, whole.lane) == (True, False, None)
    assert [dry_mesh((2, 3)).replicated(layer, sharded).copies for sharded in (False, True)] == [
        6,
        6,
    ]
