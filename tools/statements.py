"""How large each room is: statements, modules, and lines, counted by the syntax tree.

``python tools/statements.py`` prints a table of the package, its tests and its benchmarks. Neither
comments, docstrings nor line breaks change the number of statements, so that code is only smaller
where it does something in fewer of them.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def statements(source: str) -> int:
    """Statements of a module at every depth; a string that stands alone is none."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes
    )


def size(paths: list[Path]) -> tuple[int, int, int]:
    """Statements, modules and lines of files."""
    sources = [path.read_text() for path in paths]
    return sum(map(statements, sources)), len(paths), sum(len(one.splitlines()) for one in sources)


def main() -> None:
    """Print the table: the rooms of the package, largest first, then the folders beside it."""
    package = ROOT / "spatialdl"
    rooms = [path for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    rows = {f"spatialdl/{room.name}": size(list(room.rglob("*.py"))) for room in rooms}
    rows["spatialdl/*.py"] = size(list(package.glob("*.py")))
    rows = dict(sorted(rows.items(), key=lambda row: -row[1][0]))
    for folder in ("spatialdl", "benchmarks", "tests"):
        rows[f"all of {folder}"] = size(list((ROOT / folder).rglob("*.py")))
    print(f"{'':24}{'statements':>12}{'modules':>10}{'lines':>10}")
    for name, numbers in rows.items():
        print(f"{name:24}{numbers[0]:>12,}{numbers[1]:>10,}{numbers[2]:>10,}")


if __name__ == "__main__":
    main()
