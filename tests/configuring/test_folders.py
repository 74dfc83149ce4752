from __future__ import annotations

import subprocess
import sys

from hydra import compose, initialize_config_module

from spatialdl.configuring.folders import new_folder

TEN = """
from spatialdl.configuring.folders import new_folder
for _ in range(10):
    print(new_folder("x/y"))
"""


def test_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [new_folder("a/b") for _ in range(3)] == ["a/b", "a/b-2", "a/b-3"]
    (tmp_path / "a" / "c").touch()
    assert new_folder("a/c") == "a/c-2"


def test_processes_never_get_the_same(tmp_path):
    words = [sys.executable, "-c", TEN]
    together = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    found = [name for one in together for name in one.communicate()[0].split()]
    assert sorted(found) == sorted(["x/y", *(f"x/y-{n}" for n in range(2, 31))])


def test_a_configuration_has_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        hydra = compose("train", return_hydra_config=True).hydra
    assert hydra.run.dir == hydra.run.dir
    (folder,) = (tmp_path / "outputs").iterdir()
    assert hydra.run.dir == f"outputs/{folder.name}"
