"""x"""

from pathlib import Path


def save_page(path: Path, *a: object) -> None:
    path.write_text("")
