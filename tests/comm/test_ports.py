"""Where stores and ranks listen: nowhere but where ranks of other hosts need it."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.store import LOOPBACK, connect_store, keep_to_loopback, serve_store
from tests.comm.programs import ENDS_S, TORCHRUN, environment, run
from tests.comm.two_hosts import ADDRESSES, Hosts, two_hosts

JOB = str(Path(__file__).with_name("ports.py"))
SHORT = timedelta(seconds=20)
LAUNCHERS = ("prterun", "mpiexec", "hydra_pmi_proxy")
"""Open MPI's listens for its own daemons on other machines, whatever it is told."""


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_ipv6


@pytest.mark.parametrize(("address", "elsewhere"), [(LOOPBACK, "127.0.0.2"), ("::1", LOOPBACK)])
def test_a_store_listens_at_its_own_address_only(address, elsewhere):
    if ":" in address and not has_ipv6_loopback():
        pytest.skip("no IPv6 here")
    store = serve_store(address, 0, 2, SHORT)
    other = connect_store(address, store.port, 2, SHORT)
    store.set("key", "value")
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((elsewhere, store.port), timeout=5)


def test_the_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    keep_to_loopback()
    names = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # and what is left is as it was
    assert names == ("eth7", "lo")


def test_nobody_else_can_reach_the_ranks():
    """PyTorch's store, gloo and Open MPI would answer whoever asks, on all networks."""
    ways = ("mpi", "torch", "mpi4py")
    done = run(JOB, str(os.getpid()), *ways, launcher=mpiexec_command(2))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted(words[1] for words in lines if words[0] == "LOOKED") == sorted(ways * 2)
    found = [words for words in lines if words[0] == "LISTENS" and words[3] not in LAUNCHERS]
    assert [words for words in found if not ipaddress.ip_address(words[4]).is_loopback] == []
    assert {words[1] for words in found} == {"torch", "mpi4py"}  # a store, and gloo


# --- two hosts without Slurm

EACH_ITS_OWN = {host: {address} for host, address in ADDRESSES.items()}
OPEN_MPI = ("0.0.0.0 1024", ":: 1024")
"""It listens on all networks where ranks are on several hosts, from its first port upwards."""


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as made:
        yield made


def addresses(hosts: Hosts, commands: dict[str, list[str]], **more: str) -> dict[str, set[str]]:
    """Where ranks have listened, by host, when a command is run on each of these."""
    started = [
        subprocess.Popen(
            hosts.on(host, [*words, JOB, "0", "torch"]),
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, words in commands.items()
    ]
    try:
        said = [one.communicate(timeout=ENDS_S) for one in started]
    finally:
        for one in started:
            one.kill()
    assert not any(one.returncode for one in started), said
    found = defaultdict(set)
    lines = [line.split() for out, _ in said for line in out.splitlines()]
    assert len([words for words in lines if words[0] == "LOOKED"]) == 2
    for kind, _, host, *words in lines:
        if kind == "LISTENS" and " ".join(words[1:]) not in OPEN_MPI:
            found[host].add(words[1])
    return dict(found)


def test_ranks_that_mpiexec_starts_listen_at_the_address_of_their_host(hosts, tmp_path):
    agent = hosts.agent(tmp_path / "agent")
    where = ["--host", "host-a:1,host-b:1", "-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH"]
    words = [*mpiexec_command(2), *where, sys.executable]
    found = addresses(hosts, {"host-a": words}, PRTE_MCA_plm_ssh_agent=str(agent))
    assert found == EACH_ITS_OWN


@pytest.mark.slow
def test_ranks_that_torchrun_starts_listen_at_the_address_of_their_host(hosts):
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400", "--rdzv-id=1"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *meeting]
    assert addresses(hosts, dict.fromkeys(ADDRESSES, words)) == EACH_ITS_OWN


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [[*mpiexec_command(2), sys.executable], [sys.executable, *TORCHRUN]]
)
def test_ranks_on_one_host_that_has_a_network_keep_to_the_loopback(start, hosts):
    assert addresses(hosts, {"host-a": start}) == {"host-a": {LOOPBACK}}
