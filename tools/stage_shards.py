"""Copy a data set to another disk: python tools/stage_shards.py DIR --to DIR"""

from __future__ import annotations

import sys

from spatialdl.data.staging.command import main

if __name__ == "__main__":
    sys.exit(main())
