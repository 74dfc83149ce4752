"""Import images or patches: python tools/import_images.py images|clam ... --out DIR"""

from __future__ import annotations

import sys

from spatialdl.data.importing.command import main

if __name__ == "__main__":
    sys.exit(main())
