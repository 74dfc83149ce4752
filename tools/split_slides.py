"""Divide a table of slides into splits: python tools/split_slides.py labels.csv --out CSV ..."""

from __future__ import annotations

import sys

from spatialdl.slides.cohort.split_cli import main

if __name__ == "__main__":
    sys.exit(main())
