"""Figures of matplotlib as part of a page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_svg(figure: Figure) -> Markup:
    """The element `svg`, in the font of the page; the same figure gives the same text."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spatialdl"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = text.getvalue().partition("<svg")
    return Markup(start + rest)  # drawn here from numbers, so it may stand as it is
