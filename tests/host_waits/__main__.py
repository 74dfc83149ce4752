"""Tables of what a training step asks of the device and of the transport.

    python -m tests.host_waits [--json] [--places N] ["ResNet-50/*" "*/sp, LARS" ...]

Networks and layouts are those of `step`; without a pattern all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from tests.host_waits import device

device.install()  # before any other module asks PyTorch for its devices

from tests.host_waits.ledger import KINDS, Ledger, Place  # noqa: E402
from tests.host_waits.networks import NETWORKS  # noqa: E402
from tests.host_waits.step import LAYOUTS, counted_step  # noqa: E402

_HEAD = {
    "waits": "host waits",
    "d2h": "D2H copies",
    "h2d": "H2D copies",
    "messages": "messages",
    "collectives": "collectives",
    "objects": "pickled objects",
    "launches": "launches",
}
_WITH_BYTES = ("d2h", "h2d", "messages", "collectives")


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(ledger: Ledger) -> Iterator[str]:
    for kind, count in ledger.totals().items():
        size = f" ({ledger.bytes[kind] / 1e6:.1f} MB)" if kind in _WITH_BYTES else ""
        yield f"{count:,}{size}"


def _places(ledger: Ledger, most: int) -> Iterator[str]:
    """The lines with the most events of each kind."""
    for kind in KINDS:
        for place, count in ledger.events[kind].most_common(most):
            yield _row([_HEAD[kind], f"{count:,}", *_lines(place)])


def _lines(place: Place) -> tuple[str, str]:
    return f"`{place.asks}`", "" if place.does == place.asks else f"`{place.does}`"


def _as_json(ledger: Ledger) -> dict[str, Any]:
    return {
        **ledger.totals(),
        "bytes": {kind: ledger.bytes[kind] for kind in _WITH_BYTES},
        "places": {
            kind: [[count, *place] for place, count in ledger.events[kind].most_common()]
            for kind in KINDS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.host_waits", description=__doc__)
    steps = {f"{network}/{layout}": (network, layout) for network in NETWORKS for layout in LAYOUTS}
    parser.add_argument("patterns", nargs="*", help=f"of {', '.join(steps)}")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--places", type=int, default=0, help="lines to list, of each kind")
    given = parser.parse_args()
    chosen = [step for step in steps if any(fnmatch(step, one) for one in given.patterns or "*")]
    found = {step: counted_step(*steps[step]) for step in chosen}
    if given.json:
        print(json.dumps({step: _as_json(one) for step, one in found.items()}))
        return
    print(_row(["network", "layout", *_HEAD.values()]))
    print(_row(["---", "---", *["---:"] * len(_HEAD)]))
    for step, ledger in found.items():
        print(_row([*steps[step], *_cells(ledger)]))
    for step, ledger in found.items() if given.places else ():
        print(f"\n{step}\n")
        print(_row(["what", "how often", "for", "in"]))
        print(_row(["---", "---:", "---", "---"]))
        print("\n".join(_places(ledger, given.places)))


if __name__ == "__main__":
    main()
