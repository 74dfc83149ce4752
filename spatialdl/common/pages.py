"""Self-contained HTML pages from Jinja templates."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from spatialdl.common.files import replacing
from spatialdl.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_page(path: Path, package: str, **values: Any) -> None:
    """Write a page, atomically.

    Args:
        path: the HTML file.
        package: package with `page.html`, which may extend `base.html` or `article.html`.
        values: variables of the template, besides `version`; an undefined variable is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package, ""), jinja2.PackageLoader(__package__, "")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    stream = environment.get_template("page.html").generate(version=__version__, **values)
    with replacing(path) as file:
        for part in stream:
            file.write(part.encode("utf-8", "backslashreplace"))


def as_data(content: bytes, kind: str) -> str:
    """Return the data URL of a picture; kind is "png" or "jpeg"."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def as_svg(figure: Figure) -> Markup:
    """Return a figure as an `svg` element in the font of the page; the output is reproducible."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spatialdl"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = text.getvalue().partition("<svg")
    return Markup(start + rest)  # safe without escaping: generated here from numbers
