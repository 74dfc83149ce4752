"""The ranks of the benchmark of encoders trained on slides: one arm, one seed.

Slides are drawn: tiles of noise with round marks; in each slide two tiles have a rare mark, an
upright cross or a slanted one. A slide is of class 1 if both kinds occur, else it has two of one
kind: so many rare tiles, and on average so many of each kind, are in slides of both classes.

Rank 0 prints one line of JSON: the accuracy on slides of validation after each epoch, and seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import spatialdl
from spatialdl.bags import EndToEnd
from spatialdl.bench.bag_networks import MaxPooling
from spatialdl.comm.abort import install_abort_hook

SIDE, MARK, MARKS = 16, 7, 2
TILES, RARE = 24, 2
WIDTH = 16
NOISE = 0.12
PROXY_STEPS, PROXY_BATCH = 200, 64
VALIDATION = 1_000_000
"""Seed of the first slide of validation, which all runs share."""
ARMS = ("random", "proxy", "together")

_AT = torch.arange(MARK) - (MARK - 1) / 2
_ROW, _COL = _AT[:, None], _AT[None, :]
SHAPES = (
    ((_ROW**2 + _COL**2) <= 6.5).float() * 0.6,
    ((_ROW.abs() <= 0.5) | (_COL.abs() <= 0.5)).float(),
    (((_ROW - _COL).abs() <= 0.5) | ((_ROW + _COL).abs() <= 0.5)).float(),
)
"""Marks: the common one, and those of the two rare kinds."""


def draw_tile(kind: int, draw: torch.Generator, marks: int = MARKS) -> Tensor:
    """A tile (1, SIDE, SIDE) of noise with some marks, the last of which is of a kind."""
    tile = torch.randn(SIDE, SIDE, generator=draw) * NOISE
    places = torch.randint(0, SIDE - MARK + 1, (marks, 2), generator=draw).tolist()
    for number, (row, col) in enumerate(places):
        shape = SHAPES[kind if number == marks - 1 else 0]
        part = tile[row : row + MARK, col : col + MARK]
        part.copy_(torch.where(shape > 0, shape, part))
    return tile[None]


def draw_slide(seed: int) -> tuple[Tensor, Tensor]:
    """All tiles of a slide, (TILES, 1, SIDE, SIDE), and its class, (1,); even seeds are of 0."""
    draw = torch.Generator().manual_seed(seed)
    label = seed % 2
    one = 1 + int(torch.randint(2, (), generator=draw))
    rare = [1, 2] if label else [one] * RARE
    kinds = [*rare, *[0] * (TILES - RARE)]
    order = torch.randperm(TILES, generator=draw).tolist()
    return torch.stack([draw_tile(kinds[n], draw) for n in order]), torch.tensor([label])


def encoder_of() -> nn.Module:
    """Tiles (n, 1, SIDE, SIDE) to features (n, WIDTH)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, WIDTH, 3, padding=1), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
    )


def train_proxy(encoder: nn.Module, seed: int, bar: tqdm[None]) -> float:
    """Train on another task of tiles, without rare ones: how many marks there are, 1 to MARKS.

    Returns:
        Accuracy of the last tenth of the steps.
    """
    head = nn.Linear(WIDTH, MARKS)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-3)
    draw = torch.Generator().manual_seed(seed)
    right = 0.0
    for step in range(PROXY_STEPS):
        counts = torch.randint(MARKS, (PROXY_BATCH,), generator=draw)
        tiles = torch.stack([draw_tile(0, draw, 1 + n) for n in counts.tolist()])
        logits = head(encoder(tiles))
        optimizer.zero_grad()
        F.cross_entropy(logits, counts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= PROXY_STEPS * 9 // 10:
            right += float((logits.argmax(1) == counts).float().mean())
        bar.update()
    return right / (PROXY_STEPS - PROXY_STEPS * 9 // 10)


def train(options: argparse.Namespace, mesh: spatialdl.Mesh) -> dict[str, object]:
    """Train one arm; the accuracy on slides of validation after each epoch."""
    torch.manual_seed(options.seed)
    encoder, began = encoder_of(), time.perf_counter()
    steps = options.epochs * options.slides
    is_proxy = options.arm != "random"
    total = steps + is_proxy * PROXY_STEPS
    off = mesh.comm.rank != 0 or not sys.stderr.isatty()
    with tqdm(total=total, desc=options.arm, unit="step", disable=off, leave=False) as bar:
        proxy = train_proxy(encoder, options.seed, bar) if is_proxy else None
        encoder.requires_grad_(options.arm == "together")
        aggregator = MaxPooling(WIDTH)
        e2e = EndToEnd(encoder, aggregator, mesh, TILES, options.mode, progress=False)
        trained = [parameter for parameter in e2e.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=1e-2)
        first = (options.seed + 1) * 10_000
        slides = [draw_slide(first + number) for number in range(options.slides)]
        others = [draw_slide(VALIDATION + number) for number in range(options.validation)]
        start, stop = mesh.box((TILES,))
        order = torch.Generator().manual_seed(options.seed)
        accuracy = []
        for _ in range(options.epochs):
            for number, one in enumerate(torch.randperm(len(slides), generator=order).tolist(), 1):
                last = number % options.batch == 0 or number == len(slides)
                tiles, label = slides[one]
                e2e.step(tiles[start:stop], label, F.cross_entropy, average=last)
                if last:
                    spatialdl.clip_grad_norm_(e2e, mesh, options.batch)
                    optimizer.step()
                    optimizer.zero_grad()
                bar.update()
            right = [bool(e2e(tiles[start:stop]).argmax(1) == label) for tiles, label in others]
            accuracy.append(sum(right) / len(right))
            bar.set_postfix_str(f"accuracy {accuracy[-1]:.2f}")
    seconds = time.perf_counter() - began
    return {"accuracy": accuracy, "proxy_accuracy": proxy, "seconds": seconds}


def main() -> None:
    install_abort_hook()
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--lr", type=float, required=True)
    for name in ("seed", "slides", "validation", "epochs", "batch", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    mesh = spatialdl.init_mesh((options.ranks,), check=False)
    found = train(options, mesh)
    if mesh.comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
