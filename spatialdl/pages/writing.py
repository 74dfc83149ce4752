"""Pages from templates: one file for the browser, nothing from elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from spatialdl.data.saving import replacing
from spatialdl.version import __version__


def save_page(path: Path, package: str, **values: Any) -> None:
    """Write a page, whole or not at all.

    Args:
        path: the HTML file.
        package: whose folder has `page.html`; it may extend `base.html` or `article.html`.
        values: of the template, with `version`; a name without a value is an error.
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
    """The address of a picture that is in the page itself; kind is "png" or "jpeg"."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
