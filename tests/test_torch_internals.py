"""Private names of PyTorch are in one file, and a version that lacks one is refused by its name."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spatialdl import torch_internals

INTERNALS = Path(torch_internals.__file__)
TREES = {
    str(file.relative_to(INTERNALS.parent)): ast.parse(file.read_text())
    for file in INTERNALS.parent.rglob("*.py")
    if file != INTERNALS
}
IN_PLACE = {name for _, names in torch_internals.ATTRIBUTES for name in names.split()}
# of Python, OmegaConf and others; `_u` is made with weights of two dims or more only
OF_OTHERS = {
    *("_Hash", "_asdict", "_current_frames", "_exit", "_fields", "_get_full_key", "_get_node"),
    *("_getframe", "_iter_ex", "_layer_sync", "_mmap", "_replace", "_submit_command", "_target_"),
    "_u",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_imports(tree: ast.Module) -> Iterator[str]:
    """Private modules and names of PyTorch that are imported, or named in a string."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from (name for name in names if name.startswith("torch.") and is_private(name))


def private_attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of attributes, and the text in which they are looked up."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = str(getattr(node.args[1], "value", ""))
        if is_private(name):
            yield name, ast.unparse(node)


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_only_one_file_has_private_names_of_pytorch():
    ours = {name for tree in TREES.values() for name in defined(tree)}
    found = []
    for file, tree in TREES.items():
        found += [f"{file}: {name}" for name in private_imports(tree)]
        found += [
            f"{file}: {text}"
            for name, text in private_attributes(tree)
            if text.startswith(("torch.", "dist.", "nn.", "F.", "Tensor."))
            or name not in ours | IN_PLACE | OF_OTHERS
        ]
        found += [
            f"{file}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and getattr(node.value, "id", "") == "nn_functions"
            and node.attr not in IN_PLACE
        ]
    assert found == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C, "_is_tracing"), (torch, "_foreach_norm"), (torch._C._nn, "nll_loss_nd")],
)
def test_a_version_that_lacks_a_name_is_refused_by_it(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    spec = importlib.util.spec_from_file_location("again", INTERNALS)
    version = re.escape(torch.__version__)
    with pytest.raises(ImportError, match=f"PyTorch {version} .*'{name}'.* 2.8 to 2.15, "):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_names_of_the_compiler_are_there():
    for name in torch_internals.ON_FIRST_USE:
        assert getattr(torch_internals, name).__name__ == name
