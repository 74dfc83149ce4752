"""Description of a slide: its resolution, levels, and associated images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from spatialdl.errors import SlideError
from spatialdl.slides.reading.paths import slide_bytes, slide_files
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import mpp_of, power_of
from spatialdl.text import aligned, fitted, readable_bytes

HEADS = ("slide", "format", "rows", "columns", "mpp", "power", "levels", "size")
_PROBE = 64  # side of a box that is read to check that the slide can be read
_LONGEST = 100  # characters of the comment
_ASSOCIATED = re.compile(r"openslide\.associated\.(.+)\.width")


def describe_slide(path: Path) -> str:
    """Describe a slide, in lines of text.

    Raises:
        SlideError: the slide cannot be opened.
    """
    with Slide(path) as slide:
        properties, (rows, cols) = slide.properties, slide.size
        facts = [
            ("slide", str(path)),
            ("format", _format(slide)),
            ("file", _file_size(path)),
            ("size", f"{rows} rows x {cols} columns{_millimetres(slide)}"),
            ("mpp", _mpp(properties)),
            ("power", _power(slide)),
            ("background", f"#{properties.get('openslide.background-color', 'FFFFFF').strip('#')}"),
            ("bounds", _bounds(properties)),
            ("associated", _associated(properties)),
            (
                "comment",
                fitted(" ".join(properties.get("openslide.comment", "").split()), _LONGEST),
            ),
        ]
        levels = _levels(slide)
        remarks = _remarks(slide)
    lines = [f"{name:<11} {text}".rstrip() for name, text in facts if text]
    lines += ["", *levels]
    if remarks:
        lines += ["", *(f"remark: {remark}" for remark in remarks)]
    return "\n".join(lines)


def slide_in_a_line(path: Path) -> tuple[tuple[str, ...], str]:
    """Return the cells of a slide for `HEADS`, without its name, and its remarks.

    Raises:
        SlideError: the slide cannot be opened.
    """
    with Slide(path) as slide:
        power = power_of(slide.properties)
        mpp = slide.known_mpp
        cells = (
            _format(slide),
            *map(str, slide.size),
            "" if mpp is None else f"{mpp:.4g}",
            "" if power is None else f"{power:g}x",
            str(len(slide.downsamples)),
            readable_bytes(_bytes(path)),
        )
        return cells, "; ".join(_remarks(slide))


def _format(slide: Slide) -> str:
    vendor = slide.properties.get("openslide.vendor")
    return vendor or f"plain {slide.path.suffix.lstrip('.').lower() or 'image'}"


def _bytes(path: Path) -> int:
    size = slide_bytes(path)
    pixels = path.with_suffix("")
    if path.suffix.lower() == ".mrxs" and pixels.is_dir():
        size += sum(file.stat().st_size for file in pixels.iterdir() if file.is_file())
    return size


def _file_size(path: Path) -> str:
    size = _bytes(path)
    exact = f" ({size:,} bytes)" if size >= 1000 else ""
    files = len(slide_files(path))
    return readable_bytes(size) + exact + (f" in {files} files" if files > 1 else "")


def _millimetres(slide: Slide) -> str:
    mpp = slide.known_mpp
    if mpp is None:
        return ""
    down, across = (length * mpp / 1000 for length in slide.size)
    return f", {down:.2f} x {across:.2f} mm"


def _mpp(properties: Mapping[str, str]) -> str:
    x, y = (properties.get(f"openslide.mpp-{axis}") for axis in "xy")
    if x is None and y is None:
        return "unknown"
    return f"{x or '?'} horizontally, {y or '?'} vertically"


def _power(slide: Slide) -> str:
    power = power_of(slide.properties)
    if power is not None:
        return f"{power:g}x"
    try:
        return f"unknown; {slide.objective_power:.3g}x by its mpp"
    except SlideError:
        return "unknown"


def _bounds(properties: Mapping[str, str]) -> str:
    names = ("x", "y", "width", "height")
    values = [properties.get(f"openslide.bounds-{name}") for name in names]
    return ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True) if v is not None)


def _associated(properties: Mapping[str, str]) -> str:
    names = sorted(match[1] for match in map(_ASSOCIATED.fullmatch, properties) if match)
    sizes = (
        f"{name} {properties.get(f'openslide.associated.{name}.height', '?')} x "
        f"{properties[f'openslide.associated.{name}.width']}"
        for name in names
    )
    return ", ".join(sizes)


def _levels(slide: Slide) -> list[str]:
    properties, mpp = slide.properties, slide.known_mpp
    rows: list[tuple[str, ...]] = [
        ("level", "rows", "columns", "downsample", "mpp", "tile", "read")
    ]
    for level, down in enumerate(slide.downsamples):
        size, tile = (
            [properties.get(f"openslide.level[{level}].{of}{side}") for side in ("height", "width")]
            for of in ("", "tile-")
        )
        rows.append(
            (
                str(level),
                *(str(length or own) for length, own in zip(size, slide.size, strict=True)),
                f"{down:.4g}",
                "" if mpp is None else f"{mpp * down:.4g}",
                " x ".join(map(str, tile)) if None not in tile else "",
                "natively" if slide.is_native(down) else "by openslide",
            )
        )
    return aligned(rows, left=(6,))


def _remarks(slide: Slide) -> list[str]:
    remarks = []
    try:
        mpp_of(slide.properties, slide.path)
    except SlideError as error:
        remarks.append(str(error))
    if slide.remark:
        remarks.append(slide.remark)
    # not for plain images, which may have to be decoded completely
    if "openslide.vendor" in slide.properties:
        scale = slide.downsamples[-1]
        y, x = (max(0, int(length / 2 - _PROBE / 2 * scale)) for length in slide.size)
        try:
            slide.read_scaled(x, y, (_PROBE, _PROBE), scale)
        except SlideError as error:
            remarks.append(str(error))
    # without the path, which is printed already
    return [" ".join(r.replace(f"slide {slide.path}", "slide").split()) for r in remarks]
