"""Inspection and verification of slides, data sets and HDF5 files."""

from __future__ import annotations

from spatialdl.slides.inspecting.anything import inspect
from spatialdl.slides.inspecting.verifying import Verified, verify

__all__ = ["Verified", "inspect", "verify"]
