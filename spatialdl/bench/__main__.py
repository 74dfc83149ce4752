"""``python -m spatialdl.bench NAME [options]``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from spatialdl.bench import (
    analysis,
    backend,
    bag_end_to_end,
    bag_memory,
    channel_scaling,
    halo,
    io,
    late,
    memory,
    overhead,
    pipeline,
    plan,
    scaling,
    spatial,
    stream,
    suite,
    synthetic,
    tiling,
    whole_vs_tiles,
)

BENCHES: dict[str, Callable[[Sequence[str]], None]] = {
    "analysis": analysis.main,
    "backend": backend.main,
    "bag_end_to_end": bag_end_to_end.main,
    "bag_memory": bag_memory.main,
    "channel_scaling": channel_scaling.main,
    "halo": halo.main,
    "io": io.main,
    "late": late.main,
    "memory": memory.main,
    "overhead": overhead.main,
    "pipeline": pipeline.main,
    "plan": plan.main,
    "scaling": scaling.main,
    "spatial": spatial.main,
    "stream": stream.main,
    "suite": suite.main,
    "synthetic": synthetic.main,
    "tiling": tiling.main,
    "whole_vs_tiles": whole_vs_tiles.main,
}


def main() -> None:
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name not in BENCHES:
        print("usage: python -m spatialdl.bench NAME [--help], with NAME one of\n")
        for known, bench in BENCHES.items():
            about = sys.modules[bench.__module__].__doc__ or ""
            print(f"  {known:<16}{about.partition(chr(10))[0]}")
        if name not in ("", "-h", "--help"):
            sys.exit(f"\nerror: unknown benchmark {name}")
        sys.exit(0 if name else 2)
    try:
        BENCHES[name](arguments)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
