"""Data sets as users write them, for tests that name them by ``data.dataset._target_``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

CLASSES = ["square", "stripe"]


class Noise(Dataset[Any]):
    """Random tensors (3, rows, columns) with a class, changed by draws from three generators."""

    def __init__(
        self,
        count: int = 7,
        size: tuple[int, int] = (21, 18),
        split: str = "train",
        changes: bool = True,
    ) -> None:
        self.count, self.size, self.split, self.changes = count, tuple(size), split, changes
        self.classes = CLASSES

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        made = np.random.default_rng([number, len(self.split)])
        image = torch.from_numpy(made.normal(number % 2, 1, (3, *self.size)))
        if self.changes:
            image = image * (1 + 0.3 * torch.rand(())) + 0.2 * np.random.rand() + random.random()
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        return image, number % 2


class Masks(Noise):
    """The same as dicts with masks of floats, as MONAI loads them."""

    def __getitem__(self, number: int) -> dict[str, Any]:  # type: ignore[override]
        image, _ = super().__getitem__(number)
        return {"image": image, "label": (image[:1] > 0.5).float(), "name": str(number)}


class Numbers(Noise):
    """The same with two numbers, the first of them not always known."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, list[float]]:  # type: ignore[override]
        image, label = super().__getitem__(number)
        return image, [float("nan") if number == 1 else float(image.mean()), label]


class OwnGenerator(Noise):
    """It draws from generators that it keeps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.draws = {"numpy": np.random.default_rng(), "torch": [torch.Generator()]}
        self.python = random.Random()

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(number)
        more = self.draws["numpy"].random() + self.python.random()
        return image + more + torch.rand((), generator=self.draws["torch"][0]), label


class Unrepeatable(Noise):
    """A data set that draws from a source that cannot be seeded."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(number)
        return image + np.random.default_rng().random(), label


class Pictures(Dataset[Any]):
    """PIL images with a class, as torchvision's data sets return them."""

    def __init__(self, modes: tuple[str, ...] = ("RGB",), train: bool = True) -> None:
        self.modes, self.train = list(modes), train

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(number).integers(0, 256, (9, 11, 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert(self.modes[number % len(self.modes)]), number % 2


class Files(Pictures):
    """Images and a table in files that are not there."""

    def __init__(self, table: str | None = None) -> None:
        super().__init__()
        if table is not None:
            self.rows = Path(table).read_text()

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return Image.open(f"gone-{number}.png"), 0


class Given(Dataset[Any]):
    """Some samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


class Stream(IterableDataset[Any]):
    """No map-style data set."""

    def __iter__(self) -> Any:
        return iter([(torch.zeros(3, 8, 8), 0)])


class Inverted:
    """A transform of arrays."""

    def __call__(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return 255 - image
