"""Matplotlib figures embedded in a page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_svg(figure: Figure) -> Markup:
    """Return a figure as an `svg` element in the font of the page; the output is reproducible."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spatialdl"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = text.getvalue().partition("<svg")
    return Markup(start + rest)  # safe without escaping: generated here from numbers
