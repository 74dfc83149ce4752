"""Appearance of synthetic tissue: stains by absorbed light, textures, and sprites of nuclei."""

from __future__ import annotations

from functools import lru_cache
from math import pi

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from spatialdl.slides.synthetic.fields import Bytes, Floats

EPITHELIUM = 54.0  # thickness in pixels
DISTANCE_ZERO, DISTANCE_UNIT = 64, 1.5  # a distance in pixels is (byte - zero) / unit
PERIOD = 1024  # of the textures
SPRITE, SHAPES, TURNS = 25, 12, 24  # nuclei: side in pixels, shapes per family, directions


@lru_cache(maxsize=1)
def stain_tables() -> tuple[Bytes, Bytes]:
    """Return hematoxylin and eosin for each byte of distance: lumen, epithelium, stroma."""
    d = (np.arange(256) - DISTANCE_ZERO) / DISTANCE_UNIT
    lumen_edge, outer_edge = _step(d, 0, 2.5), _step(d, EPITHELIUM, 4)
    brush = np.exp(-(((d - 3) / 3) ** 2))
    cleft = np.exp(-(((d - EPITHELIUM - 3) / 4) ** 2))  # the lighter line around a gland
    hematoxylin = 3 + lumen_edge * (36 - 26 * outer_edge)
    eosin = 9 + lumen_edge * (62 + 40 * outer_edge) + 22 * brush - 38 * cleft
    return to_byte(hematoxylin), to_byte(eosin)


def colour_table(random: np.random.Generator) -> npt.NDArray[np.uint32]:
    """Return packed RGB for every (hematoxylin, eosin) pair of bytes, by their absorption."""
    absorbs_h = np.array([0.65, 0.72, 0.29]) + random.normal(0, 0.01, 3)
    absorbs_e = np.array([0.14, 0.92, 0.38]) + random.normal(0, 0.01, 3)
    strength_h, strength_e = 1.75 * random.uniform(0.94, 1.06), 1.15 * random.uniform(0.94, 1.06)
    glass = np.array([244, 243, 245]) + random.normal(0, 1.0, 3)
    byte = np.arange(256)[:, None] / 160
    light_h = np.exp(-byte * absorbs_h * strength_h)
    light_e = np.exp(-byte * absorbs_e * strength_e)
    rgb = np.zeros((256, 256, 4), np.uint8)
    rgb[..., :3] = np.round(glass * light_h[:, None] * light_e[None, :])
    return rgb.reshape(-1).view(np.uint32)


def rgb(packed: npt.NDArray[np.uint32]) -> Bytes:
    return packed.view(np.uint8).reshape(*packed.shape, 4)[..., :3]


def textures(seed: int) -> tuple[Bytes, Bytes]:
    """Return textures of fibres and grain, periodic, as bytes around 128."""
    random = np.random.default_rng(seed)
    noise = random.normal(0, 1, (2, PERIOD, PERIOD)).astype(np.float32)
    fibres = _unit(ndimage.gaussian_filter(noise[0], (1.6, 22), mode="wrap"))
    fibres += 0.5 * _unit(ndimage.gaussian_filter(noise[1], 5, mode="wrap"))
    row, col = np.ogrid[:PERIOD, :PERIOD]
    turns = 2 * pi * col / PERIOD
    ripple = np.rint(11 * np.sin(3 * turns) + 7 * np.sin(8 * turns + 1)).astype(int)
    fibres = fibres[(row + ripple) % PERIOD, col]
    grain = _unit(ndimage.gaussian_filter(noise[1], 1.4, mode="wrap"))
    return to_byte(128 + 21 * fibres), to_byte(128 + 26 * grain)


def _unit(field: Floats) -> Floats:
    return np.asarray(field / field.std(), np.float32)


def cut(texture: Bytes, row0: int, col0: int, height: int, width: int) -> Bytes:
    """Return a window of a periodic texture."""
    rows, cols = row0 % PERIOD, col0 % PERIOD
    times = -(-(rows + height) // PERIOD), -(-(cols + width) // PERIOD)
    return np.tile(texture, times)[rows : rows + height, cols : cols + width]


def multiply(values: Bytes, factor: Bytes) -> None:
    """Compute `values * factor / 128` in place, clipped to 255, in blocks of rows for the cache."""
    for row in range(0, len(values), 32):
        part = values[row : row + 32]
        product = np.multiply(part, factor[row : row + 32], dtype=np.uint16)
        product >>= 7
        np.minimum(product, 255, out=part, casting="unsafe")


@lru_cache(maxsize=1)
def nucleus_sprites() -> list[list[Bytes]]:
    """Return sprites in all directions: nuclei of epithelium, spindles, lymphocytes."""
    random = np.random.default_rng(7)
    down, across = np.mgrid[:SPRITE, :SPRITE] - SPRITE // 2
    sprites = []
    for long, short, dark in ((8.5, 5.6, 135), (9.5, 3.0, 150), (4.8, 4.4, 190)):
        for _ in range(SHAPES):
            longer, shorter = long * random.uniform(0.85, 1.2), short * random.uniform(0.85, 1.15)
            depth = dark * random.uniform(0.75, 1.2)
            chromatin = ndimage.gaussian_filter(random.normal(0, 1, (SPRITE, SPRITE)), 1.1)
            turned = []
            for turn in range(TURNS):
                c, s = np.cos(turn * pi / TURNS), np.sin(turn * pi / TURNS)
                along, aside = across * c + down * s, down * c - across * s
                out = np.hypot(along / longer, aside / shorter)
                body = np.clip((1.04 - out) * shorter / 1.5, 0, 1)
                rim = 0.85 + 0.25 * np.clip(out, 0, 1) ** 4
                turned.append(to_byte(body * depth * (rim + 0.55 * chromatin)))
            sprites.append(turned)
    return sprites


def stamp(image: Bytes, sprite: Bytes, row: int, col: int) -> None:
    """Overlay an image with a sprite by the maximum, clipped to the image."""
    top, left = max(row, 0), max(col, 0)
    view = image[top : max(row + SPRITE, 0), left : max(col + SPRITE, 0)]
    part = sprite[top - row :, left - col :][: view.shape[0], : view.shape[1]]
    np.maximum(view, part, out=view)


def _step(x: npt.NDArray[np.float64], at: float, width: float) -> npt.NDArray[np.float64]:
    return np.clip((x - at) / width + 0.5, 0, 1)


def to_byte(values: npt.NDArray[np.floating]) -> Bytes:
    return np.asarray(np.clip(np.rint(values), 0, 255), np.uint8)
