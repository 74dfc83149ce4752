from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest

from spatialdl.comm.store import LOOPBACK, connect_store, keep_to_loopback, serve_store

SHORT = timedelta(seconds=20)


def test_a_store_listens_at_its_own_address_only():
    store = serve_store(LOOPBACK, 0, 2, SHORT)
    other = connect_store(LOOPBACK, store.port, 2, SHORT)
    store.set("key", "value")
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_a_store_over_ipv6():
    if not socket.has_ipv6 or not has_ipv6_loopback():
        pytest.skip("no IPv6 here")
    store = serve_store("::1", 0, 2, SHORT)
    store.set("key", "value")
    assert connect_store("::1", store.port, 2, SHORT).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, store.port), timeout=5)


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_key_that_nobody_sets_is_waited_for_no_longer_than_was_said():
    store = serve_store(LOOPBACK, 0, 1, timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        store.get("nobody's")


def test_the_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    keep_to_loopback()
    names = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # and what is left is as it was
    assert names == ("eth7", "lo")
