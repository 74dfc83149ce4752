"""LightningModules in users' style, and a Trainer's run of one, split or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from spatialdl.training.lightning import SpatialStrategy

SAMPLES, ROWS, COLUMNS, CLASSES = 12, 23, 18, 3


class Encoder(nn.Sequential):
    """Strides, BatchNorm, dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(4, CLASSES),
        )


class Classifier(L.LightningModule):
    """Momentum, a schedule, and losses logged of steps and epochs."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.net = Encoder(dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("validation", loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self.net(batch[0])
        return scores

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Segmenter(L.LightningModule):
    """A map of scores and one of distances for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Upsample(size=(ROWS, COLUMNS), mode="bilinear"),
            nn.Conv2d(4, CLASSES + 1, 1),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.net(batch["image"])
        loss = F.cross_entropy(scores[:, :CLASSES], batch["mask"])
        return loss + 0.1 * F.mse_loss(scores[:, CLASSES], batch["distance"])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.net(batch["image"])
        return scores.full_tensor() if hasattr(scores, "full_tensor") else scores

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def labelled(samples: int = SAMPLES) -> TensorDataset:
    numbers = draw()
    images = torch.randn(samples, 2, ROWS, COLUMNS, generator=numbers)
    return TensorDataset(images, torch.randint(CLASSES, (samples,), generator=numbers))


class Masked(torch.utils.data.Dataset[dict[str, Any]]):
    """Images, integer masks, float maps, and names."""

    def __init__(self) -> None:
        numbers, size = draw(), (SAMPLES, ROWS, COLUMNS)
        self.images = torch.randn(SAMPLES, 2, ROWS, COLUMNS, generator=numbers)
        self.masks = torch.randint(CLASSES, size, generator=numbers)
        self.distances = torch.rand(size, generator=numbers)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, n: int) -> dict[str, Any]:
        of_maps = {"mask": self.masks[n], "distance": self.distances[n]}
        return {"image": self.images[n], "name": f"number {n}", **of_maps}


class Followed(Callback):
    """Records logged values per epoch, and the gradients used in each step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Tensor]] = []
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads).clone())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.logged.append(dict(trainer.callback_metrics))


def fitted(
    strategy: SpatialStrategy | str,
    make: Callable[[], L.LightningModule] = Classifier,
    data: Any = None,
    batch: int = 2,
    *,
    shuffle: bool = True,
    sampler: Any = None,
    seed: int = 5,
    validates: bool = False,
    ckpt_path: Any = None,
    **arguments: Any,
) -> tuple[L.LightningModule, L.Trainer, Followed]:
    """A module after a run with `SpatialStrategy`, or ``auto`` for a single process."""
    torch.manual_seed(seed)
    module, followed = make(), Followed()
    arguments = {"precision": "64-true", "max_epochs": 2, "enable_checkpointing": False} | arguments
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        logger=arguments.pop("logger", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[followed, *arguments.pop("callbacks", [])],
        **arguments,
    )
    data = labelled() if data is None else data
    loaders = [DataLoader(data, batch, shuffle=shuffle and sampler is None, sampler=sampler)]
    if validates:
        loaders.append(DataLoader(labelled(7), batch))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=False)
    return module, trainer, followed


def assert_equal(ours: nn.Module, plain: nn.Module, tolerance: float = 1e-10) -> None:
    found, expected = ours.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
