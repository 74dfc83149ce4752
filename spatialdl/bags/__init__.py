"""Slides as bags of tiles: networks trained on all tiles of a slide in one step."""

from spatialdl.bags.end_to_end import EndToEnd
from spatialdl.bags.network import EndToEndNetwork

__all__ = ["EndToEnd", "EndToEndNetwork"]
