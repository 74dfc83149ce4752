"""Looking into slides and into what is cut from them."""

from __future__ import annotations

from spatialdl.slides.inspecting.anything import inspect
from spatialdl.slides.inspecting.verifying import Verified, verify

__all__ = ["Verified", "inspect", "verify"]
