"""Disabling downloads of third-party libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.hub


class DownloadError(ValueError):
    """A file is not cached on this machine, and downloads are disabled."""


@contextmanager
def offline() -> Iterator[None]:
    """Restrict hubs to their caches within the block."""

    def refuse(url: str, *args: Any, **named: Any) -> None:
        raise DownloadError(f"{url} is not in {torch.hub.get_dir()}/checkpoints")

    constants: Any = None
    try:
        from huggingface_hub import constants as found

        constants = found
    except ImportError:
        pass
    with (
        patch.dict(os.environ, HF_HUB_OFFLINE="1"),
        patch("torch.hub.download_url_to_file", refuse),
    ):
        if constants is None:
            yield
            return
        with patch.object(constants, "HF_HUB_OFFLINE", new=True):
            yield
