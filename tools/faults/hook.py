"""Plants a fault, or probes, in modules while they are imported; the sources stay as they are.

A ``.pth`` file of the environment runs this in every Python process that has SPATIALDL_FAULTS, also
in those that tests start. The variable names a JSON file: ``{"modules": {"spatialdl.x": [[3,
site]]}, "replaced": {"spatialdl.y": "path of its source"}, "record": "folder"}``. With ``record``
the statements are probed: each process writes which test came to which of them. Without it the
faults are planted.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

sys.path.append(os.environ["SPATIALDL_FAULTS_TOOLS"])  # for the plugin of pytest as well
import sites


class _Recorder:
    """Writes which test reached which probe, once for each process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: set[tuple[int, str]] = set()

    def __call__(self, number: int) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
        if (number, test) in self._seen:
            return
        self._seen.add((number, test))
        part = os.environ.get("SPATIALDL_FAULTS_PART", "")
        with open(f"{self._folder}/{os.getpid()}.reached", "a") as file:
            file.write(json.dumps([number, part, test]) + "\n")


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, plan: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._plan = plan

    def get_code(self, fullname: str) -> CodeType | None:
        source = self._plan["replaced"].get(fullname, self.path)
        tree = ast.parse(Path(source).read_text())
        marked = [(n, sites.Site(**site)) for n, site in self._plan["modules"].get(fullname, [])]
        if self._plan["record"]:
            tree = sites.probe(tree, marked)
        else:
            for _, site in marked:
                tree = sites.plant(tree, site)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._plan["modules"] and name not in self._plan["replaced"]:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._plan)
        return spec


def install(plan: dict[str, Any]) -> None:
    """Find the modules of the plan before anybody else does."""
    if plan["record"]:
        builtins.__fault_probe__ = _Recorder(plan["record"])  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder(plan))


if "spatialdl" in sys.modules:
    raise RuntimeError("spatialdl was imported before its faults were planted")
install(json.loads(Path(os.environ["SPATIALDL_FAULTS"]).read_text()))
