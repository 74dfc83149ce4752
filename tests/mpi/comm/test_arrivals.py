"""Ranks of a machine see each other come."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from mpi4py import MPI

from spatialdl.comm.backend.arrivals import Arrivals


def test_a_rank_sleeps_until_the_others_have_come():
    world = MPI.COMM_WORLD
    arrivals = Arrivals(world)
    for last in range(world.size):
        if world.rank != last:
            arrivals.arrive()
            sleeper = Thread(target=arrivals.sleep, daemon=True)
            sleeper.start()
            assert sleeper.is_alive()
        world.Barrier()  # everybody has seen that
        if world.rank == last:
            arrivals.arrive()
            arrivals.sleep()
        else:
            sleeper.join()
        world.Barrier()


def test_the_memory_has_no_name_left():
    world = MPI.COMM_WORLD
    kept = Arrivals(world)
    world.Barrier()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "spatialdl-" in line]
    assert all(line.endswith("(deleted)") for line in mapped)
    assert len(mapped) >= 1
    del kept
