"""Cut slides into a data set of tiles: python tools/tile_slides.py SLIDES... --out DIR ..."""

from __future__ import annotations

import sys

from spatialdl.slides.tile_cli import main

if __name__ == "__main__":
    sys.exit(main())
