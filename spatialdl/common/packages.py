"""Imports of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needed(package: str, extra: str, what: str = "it") -> Any:
    """Import a package that only some uses need.

    Args:
        package: the package or one of its modules.
        extra: the extra of spatialdl that installs it.
        what: what needs it, for the message.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(f"{what} requires {name}: pip install 'spatialdl[{extra}]'") from None
