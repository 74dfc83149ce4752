from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from spatialdl.bench import slow_source
from spatialdl.bench.slow_source import SlowSource, environment

READS = """
import os, sys
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    assert os.preadv(file, [bytearray(3000)], 1000) == 3000
"""


def test_the_rate_is_shared(tmp_path):
    rate = 20e6
    began = time.monotonic()

    def read() -> None:
        SlowSource(str(tmp_path / "state"), rate).serve(2_500_000)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 5_000_000 / rate - slow_source._IDLE_S
    assert SlowSource(str(tmp_path / "state"), rate).served() == 5_000_000


def test_processes_read_the_folder_slowly_and_others_not(tmp_path):
    for name in ("set", "settled", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(4000))
    (tmp_path / "link").symlink_to(tmp_path / "set")
    server, slow = environment(tmp_path / "link", 1e6, tmp_path / "work")
    assert server.served() == 0
    paths = [str(tmp_path / name / "file") for name in ("set", "settled", "link")]
    for _ in range(2):
        command = [sys.executable, "-c", READS, *paths]
        subprocess.run(command, env={**os.environ, **slow}, check=True)
    assert server.served() == 2 * 2 * 3000


def test_a_copy_of_the_hook_elsewhere_does_nothing(tmp_path):
    installed = []
    slow_source._start({}, lambda **given: installed.append(given))
    assert not installed
    (tmp_path / "work").mkdir()
    _, slow = environment(tmp_path, 5.0, tmp_path / "work")
    slow_source._start(slow, lambda **given: installed.append(given))
    assert installed[0]["rate"] == pytest.approx(5.0)
