"""Places in the sources where a fault can be planted, and the planting of one.

A fault is a change of one expression or statement inside a function: a comparison turned round, a
number that is one too large, a call that is left out. Where ranks talk there are more: an exchange
or a reduction that is skipped, a bound of a box shifted by one, two axes swapped. A fault is named
by its file, function, statement and operator, so that it is found again after lines have moved.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

TALKING = ("comm", "layout", "pipeline", "spatial")
"""Folders whose functions get the faults of communication as well."""

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
_QUIET = ("log", "debug", "info", "warn", "print", "close")
_REDUCTIONS = ("reduce", "average", "allgather", "all_gather")
_EXCHANGES = ("exchange", "repartition", "send", "receive", "recv", "barrier", "wait", "move")
_BOUNDS = ("start", "stop", "low", "high", "begin", "end", "first", "last", "offset", "before")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Site:
    """Where and how one fault is planted.

    Attributes:
        file: path below the root of the repository.
        function: its name, with those of the classes and functions around it.
        statement: the statement's first line, as `ast.unparse` writes it.
        repeat: number of equal statements before it in the function.
        operator: kind of the fault.
        index: number of places for the operator in the statement before this one.
        line: line of the statement when it was drawn; for people only.
    """

    file: str
    function: str
    statement: str
    repeat: int
    operator: str
    index: int
    line: int = 0

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator} in {self.function}: {self.statement}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """All functions of a module with their qualified names."""

    def inside(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                path = (*names, child.name)
                if isinstance(child, Function):
                    yield ".".join(path), child
                yield from inside(child, path)
            else:
                yield from inside(child, names)

    yield from inside(tree, ())


def statements(function: Function) -> Iterator[ast.stmt]:
    """Those of a function, without its docstring and without those of functions inside it."""
    todo: list[ast.AST] = list(reversed(function.body))
    while todo:
        node = todo.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.stmt) and not _is_text(node):
            yield node
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def text_of(statement: ast.stmt) -> str:
    return ast.unparse(statement).partition("\n")[0]


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Expressions of a statement, without those of statements inside it and of annotations."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, ast.Raise | ast.JoinedStr) or _is_strict(node):
                continue  # texts of messages, and zip(strict=True) of what is equally long
            for child in value if isinstance(value, list) else [value]:
                inner = ast.stmt | ast.ExceptHandler | ast.match_case
                if isinstance(child, ast.AST) and not isinstance(child, inner):
                    todo.append(child)


def _is_strict(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _passed_on(call: ast.AST) -> ast.expr | None:
    """The argument that comes back unchanged where a call is skipped: the first tensor."""
    for argument in call.args if isinstance(call, ast.Call) else ():
        text = ast.unparse(argument).lower()
        is_data = isinstance(argument, ast.Name | ast.Attribute | ast.Subscript)
        if is_data and not any(word in text for word in ("comm", "mesh", "plan", "group", "name")):
            return argument
    return None


def _says(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _operators(node: ast.AST, talks: bool) -> Iterator[str]:
    """The faults that can be planted at a node."""
    if isinstance(node, ast.Expr) and _called(node.value):
        name = _called(node.value)
        if not _says(name, _QUIET):
            yield "exchange" if talks and _says(name, _EXCHANGES + _REDUCTIONS) else "drop"
    if isinstance(node, ast.If | ast.IfExp):
        yield "negate"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield "compare"
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED and not _has_text(node):
        yield "arithmetic"
    if isinstance(node, ast.BoolOp):
        yield "and-or"
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant"
    if talks:
        name = _called(node)
        if _says(name, _REDUCTIONS + _EXCHANGES) and _passed_on(node) is not None:
            yield "reduction" if _says(name, _REDUCTIONS) else "exchange"
        bound = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if bound.lower() in _BOUNDS and isinstance(getattr(node, "ctx", None), ast.Load):
            yield "box"
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
            yield "axes"


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.JoinedStr)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str | bytes))
        for inner in ast.walk(node)
    )


def sites(root: Path, file: Path) -> Iterator[list[Site]]:
    """The faults of each statement of a file."""
    name = str(file.relative_to(root))
    talks = file.relative_to(root).parts[1] in TALKING
    for function, node in functions(ast.parse(file.read_text())):
        met: dict[str, int] = {}
        for statement in statements(node):
            text = text_of(statement)
            repeat = met[text] = met.get(text, -1) + 1
            found = []
            counts: dict[str, int] = {}
            for inner in _own_nodes(statement):
                for operator in _operators(inner, talks):
                    index = counts[operator] = counts.get(operator, -1) + 1
                    found.append(
                        Site(name, function, text, repeat, operator, index, statement.lineno)
                    )
            yield found


def find(tree: ast.Module, site: Site) -> ast.stmt | None:
    """The statement of a site, in the function of its name or any other that has it."""
    named = list(functions(tree))
    exact = [node for name, node in named if name == site.function]
    for node in [*exact, *(node for name, node in named if name != site.function)]:
        equal = [inner for inner in statements(node) if text_of(inner) == site.statement]
        if len(equal) > site.repeat:
            return equal[site.repeat]
    return None


def plant(tree: ast.Module, site: Site) -> ast.Module:
    """The module with the fault.

    Raises:
        LookupError: the statement is not there.
    """
    tree = copy.deepcopy(tree)
    statement = find(tree, site)
    if statement is None:
        raise LookupError(f"no statement {site.statement!r} in {site.file}")
    talks = site.operator in ("exchange", "reduction", "box", "axes") or (
        Path(site.file).parts[1] in TALKING
    )
    index = -1
    for node in _own_nodes(statement):
        for operator in _operators(node, talks):
            if operator == site.operator:
                index += 1
                if index == site.index:
                    _replace(tree, node, _faulty(node, operator))
                    return ast.fix_missing_locations(tree)
    raise LookupError(f"no {site.operator} in {site.statement!r} of {site.file}")


def _faulty(node: ast.AST, operator: str) -> ast.AST:
    """What stands at the node instead."""
    if isinstance(node, ast.Expr):  # a call that is left out
        return ast.copy_location(ast.Pass(), node)
    changed: ast.AST = copy.deepcopy(node)
    if operator == "negate":
        changed.test = ast.UnaryOp(ast.Not(), changed.test)  # type: ignore[attr-defined]
    elif operator == "compare":
        changed.ops[0] = _COMPARED[type(changed.ops[0])]()  # type: ignore[attr-defined]
    elif operator == "arithmetic":
        changed.op = _COMPUTED[type(changed.op)]()  # type: ignore[attr-defined]
    elif operator == "and-or":
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()  # type: ignore[attr-defined]
    elif operator == "constant":
        value = changed.value  # type: ignore[attr-defined]
        changed.value = (not value) if isinstance(value, bool) else value + 1  # type: ignore[attr-defined]
    elif operator in ("reduction", "exchange"):
        changed = _passed_on(changed)  # type: ignore[assignment]
    elif operator == "box":
        changed = ast.BinOp(changed, ast.Add(), ast.Constant(1))  # type: ignore[arg-type]
    elif operator == "axes":
        elements = changed.elts  # type: ignore[attr-defined]
        elements[0], elements[1] = elements[1], elements[0]
    return ast.copy_location(changed, node)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                value[[item is old for item in value].index(True)] = new
                return
    raise LookupError("the node is not in the tree")


def probe(tree: ast.Module, marked: list[tuple[int, Site]]) -> ast.Module:
    """The module with a call of ``__fault_probe__(number)`` before the statement of each site."""
    found = [(number, find(tree, site)) for number, site in marked]
    for number, statement in found:
        if statement is not None:
            insert_before(tree, statement, number)
    return ast.fix_missing_locations(tree)


def insert_before(tree: ast.AST, statement: ast.stmt, number: int) -> None:
    """Put the call of the probe before a statement."""
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(item is statement for item in value):
                at = [item is statement for item in value].index(True)
                call = ast.Call(ast.Name("__fault_probe__", ast.Load()), [ast.Constant(number)], [])
                is_elif = isinstance(parent, ast.If) and value is parent.orelse
                line = parent if is_elif else statement
                value.insert(at, ast.copy_location(ast.Expr(ast.copy_location(call, line)), line))
                return
