"""Slides as bags of tiles: networks trained on all tiles of a slide in one step."""

from spatialdl.bags.network import EndToEndNetwork

__all__ = ["EndToEndNetwork"]
