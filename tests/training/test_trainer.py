"""Training loop in a single process; other layouts are compared with it in tests/mpi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.loader import sample_order, to_input
from spatialdl.data.synthetic import SyntheticDataset, SyntheticMasks
from spatialdl.training.network.building import build_model
from spatialdl.training.trainer import Trainer
from tests import fitting
from tests.composing import composed
from tests.fitting import fit, make_trainer, summary
from tests.training.checkpoints.runs import table

TINY = [
    *("data.image_size=[40,36]", "data.num_classes=3", "data.samples=10", "data.batch_size=4"),
    *("data.validation_samples=5", "trainer.precision=float64", "trainer.max_steps=3"),
    "device=cpu",
]
SMALL = ["++model._target_=tests.mpi.training.small.small", "~model.width"]


def settings_of(*words: str) -> list[str]:
    has_network = any("model" in word.partition("=")[0] for word in words)
    return [*TINY, *([] if has_network else SMALL), *words]


def config(*words: str) -> DictConfig:
    return composed("train", *settings_of(*words))


def train(run_dir: Path, *overrides: str) -> Trainer:
    return fitting.train(run_dir, *settings_of(*overrides))


def batch(samples: list[int], seed: int = 0, masks: bool = False) -> tuple[Tensor, Tensor]:
    kind = SyntheticMasks if masks else SyntheticDataset
    images = kind(10, (40, 36), num_classes=3, seed=seed)
    pixels = torch.stack([torch.from_numpy(images.read(n)) for n in samples])
    x = to_input(pixels, torch.float64, torch.device("cpu"))
    if not masks:
        return x, torch.from_numpy(images.labels[samples])
    return x, torch.stack([torch.from_numpy(images.read_mask(n)).long() for n in samples])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As the optimizers' configurations have it: weights decay, norms and biases do not."""
    learning = [one for one in model.parameters() if one.requires_grad]
    others = [one for one in learning if one.dim() <= 1]
    weights = [one for one in learning if one.dim() > 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    slices: int = 1,
    seed: int = 0,
    masks: bool = False,
    scheduler: Any = None,
    mixed: torch.dtype | None = None,
) -> dict[str, list[float]]:
    """An epoch as PyTorch's tutorials write it."""
    scaler = torch.amp.GradScaler("cpu", enabled=mixed is torch.float16)
    autocast = torch.autocast("cpu", mixed or torch.bfloat16, enabled=mixed is not None)
    order, dtype = sample_order(10, seed, 0).tolist(), next(model.parameters()).dtype
    found: dict[str, list[float]] = {"loss": [], "rate": [], "scale": []}
    for samples in (order[:4], order[4:8], order[8:]):
        optimizer.zero_grad()
        total, size = 0.0, len(samples) // slices
        for first in range(0, len(samples), size):
            x, target = batch(samples[first : first + size], seed, masks)
            with autocast:
                loss = criterion(model(x.to(dtype)), target)
            scaler.scale(loss * size / len(samples)).backward()
            total += loss.item() * size / len(samples)
        found["loss"].append(total)
        found["rate"].append(optimizer.param_groups[0]["lr"])
        found["scale"].append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
    return found


def check_weights(trainer: Trainer, model: nn.Module, most: float = 1e-12) -> None:
    ours = trainer.parts.pipeline.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=most)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Trainer, Path]:
    """A run without any other settings."""
    path = tmp_path_factory.mktemp("plain")
    return train(path), path


def check_same(trainer: Trainer, plain: tuple[Trainer, Path]) -> None:
    check_weights(trainer, plain[0].parts.pipeline.stages[0], most=0)


def test_the_losses_are_those_of_a_plain_loop(tmp_path):
    settings = config("scheduler=cosine", "optimizer=adamw", "parallel.microbatches=2")
    trainer = Trainer(settings, SingleProcess())
    model = build_model(config(), trainer.parts.sources).double()
    fit(trainer, tmp_path)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3, weight_decay=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    expected = plain_loop(model, optimizer, slices=2, scheduler=cosine)
    found = summary(tmp_path)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    assert (found["world_size"], len(found["peak_memory_mb"])) == (1, 1)
    rows = table(tmp_path / "metrics.csv")
    assert trainer.progress.step == trainer.parts.steps == len(rows) == 3
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == found["loss"]
    assert "loss_scale" not in rows[0]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(expected["rate"])
    check_weights(trainer, model)


SEGMENTED = ["model=unet", "++model.width=2", "++model.depth=2"]


def test_segmentation_s_losses_are_those_of_a_plain_loop(tmp_path):
    settings = config(*SEGMENTED, "parallel.microbatches=2")
    trainer = Trainer(settings, SingleProcess())
    model = build_model(settings, trainer.parts.sources).double()
    fit(trainer, tmp_path)
    expected = plain_loop(model, sgd(model), slices=2, masks=True)
    assert summary(tmp_path)["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    (row,) = table(tmp_path / "validation.csv")
    with torch.no_grad():
        x, target = batch(list(range(5)), seed=1, masks=True)
        output = model.eval()(x)
    assert float(row["loss"]) == pytest.approx(F.cross_entropy(output, target).item())
    assert float(row["accuracy"]) == pytest.approx((output.argmax(1) == target).double().mean())
    assert 0 < float(row["mean_iou"]) < float(row["mean_dice"]) < 1
    assert len(summary(tmp_path)["validation"][0]["dice"]) == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_trains_as_a_plain_loop_does(tmp_path, precision):
    trainer = train(tmp_path, f"trainer.precision={precision}")
    model = build_model(config(), trainer.parts.sources)
    expected = plain_loop(model, sgd(model), mixed=trainer.parts.precision.mixed)
    assert summary(tmp_path)["loss"] == expected["loss"]
    check_weights(trainer, model, most=0)
    rows = table(tmp_path / "metrics.csv")
    if precision == "fp16-mixed":
        assert [float(row["loss_scale"]) for row in rows] == expected["scale"]
        assert {int(row["skipped"]) for row in rows} <= {0, 1}
    else:
        assert "loss_scale" not in rows[0]


def test_what_is_frozen_stays_and_the_rest_is_that_of_a_plain_loop(tmp_path):
    model = build_model(config(), make_trainer(*settings_of()).parts.sources)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "start.pt")
    words = ("seed=5", f"weights={tmp_path / 'start.pt'}", "task.class_weights=[1,2,0.5]")
    words += ("trainer.freeze=[conv1.*,bn1.*]", "task.label_smoothing=0.2")
    trainer = train(tmp_path / "run", *words)
    model.double().train()
    for module in (model.conv1, model.bn1):
        module.requires_grad_(False).eval()
    weight = torch.tensor([1, 2, 0.5], dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(weight, label_smoothing=0.2)
    expected = plain_loop(model, sgd(model), criterion, seed=5)
    assert summary(tmp_path / "run")["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    check_weights(trainer, model)


def test_validation_counts_every_sample_once_and_changes_nothing(tmp_path, plain):
    """Of 3 slices of the last batch, of one sample, two are empty."""
    trainer = train(tmp_path, "parallel.microbatches=3", "trainer.validate_every=1")
    with torch.no_grad():
        x, target = batch(list(range(5)), seed=1)
        output = trainer.parts.pipeline.stages[0].eval()(x)
    validations = table(tmp_path / "validation.csv")
    assert [int(row["step"]) for row in validations] == [1, 2, 3]
    row = validations[-1]
    assert int(row["samples"]) == 5
    assert float(row["loss"]) == pytest.approx(F.cross_entropy(output, target).item())
    assert float(row["accuracy"]) == pytest.approx((output.argmax(1) == target).double().mean())
    rows = table(tmp_path / "predictions.csv")
    assert [int(row["sample"]) for row in rows] == list(range(5))
    assert [int(row["label"]) for row in rows] == target.tolist()
    shares = [[float(row[f"probability_{c}"]) for c in range(3)] for row in rows]
    torch.testing.assert_close(torch.tensor(shares).double(), output.softmax(1))
    never = train(tmp_path / "never", "data.validation_samples=0")
    assert summary(tmp_path / "never")["loss"] == summary(plain[1])["loss"]
    assert not (tmp_path / "never" / "validation.csv").exists()
    check_same(never, plain)


def test_accumulated_batches_are_one_batch(tmp_path):
    """As in Lightning: a step accumulates several batches of `data.batch_size`."""
    whole = train(tmp_path / "whole", "parallel.microbatches=2")
    ours = train(tmp_path / "parts", "data.batch_size=2", "trainer.accumulate=2")
    assert summary(tmp_path / "parts")["loss"] == summary(tmp_path / "whole")["loss"]
    assert ours.progress.step == whole.progress.step == 3
    check_same(ours, (whole, tmp_path))
    # of one batch at a time are activations held
    kinds = [action.kind for action in ours.parts.pipeline.schedule.train[0]]
    assert kinds == ["forward", "backward"] * 2


def test_averaged_weights_are_validated_and_the_others_trained(tmp_path, plain):
    averaged = train(tmp_path, "trainer.ema=0.7")
    assert summary(tmp_path)["loss"] == summary(plain[1])["loss"]
    check_same(averaged, plain)
    model = build_model(config(), averaged.parts.sources).double().eval()
    ours = averaged.parts.pipeline.state_dict()
    model.load_state_dict(ours | averaged.parts.update.average.state_dict())
    x, target = batch(list(range(5)), seed=1)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), target)
    found = summary(tmp_path)["validation"][-1]["loss"]
    assert found == pytest.approx(loss.item(), abs=1e-12)
    assert found != summary(plain[1])["validation"][-1]["loss"]


def test_one_batch_is_overfitted_without_validation(tmp_path):
    trainer = train(tmp_path, "debug=overfit", "trainer.max_steps=3", "optimizer.lr=0")
    assert trainer.progress.step == 3
    losses = summary(tmp_path)["loss"]
    assert losses == [losses[0]] * 3, "every step sees the same batch"
    assert not (tmp_path / "validation.csv").exists()
    assert not (tmp_path / "checkpoints").exists()


def of_volumes(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv3d(in_channels, 4, 3, padding=1), nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, num_classes))


OF_VOLUMES = (f"++model._target_={__name__}.of_volumes", "~model.width", "data.image_size=[6,7,5]")


@pytest.mark.parametrize(
    ("words", "order"), [((), torch.channels_last), (OF_VOLUMES, torch.channels_last_3d)]
)
def test_channels_last_changes_the_order_in_memory_only(tmp_path, plain, words, order):
    """With volumes it failed after the ranks had started."""
    plain = train(tmp_path / "plain", *words) if words else plain[0]
    last = train(tmp_path / "last", *words, "trainer.channels_last=true")
    weights = [p for p in last.parts.pipeline.parameters() if p.dim() > 3 and p.shape[2] > 1]
    assert all(p.is_contiguous(memory_format=order) for p in weights)
    check_weights(last, plain.parts.pipeline.stages[0])


def test_a_run_can_be_seen(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = config("trainer.validate_every=2", "logger=tensorboard", "optimizer=adamw")
    Trainer(settings, SingleProcess()).fit(tmp_path)
    split = summary(tmp_path)["time_split"]
    assert split.pop("seconds_per_step") > 0
    assert sum(split.values()) == pytest.approx(1)
    assert split["halo"] == split["hand_over"] == 0 < split["compute"]
    rows = table(tmp_path / "metrics.csv")
    assert all(float(row["halo"]) == 0 <= float(row["reduce"]) < 1 for row in rows)
    page = (tmp_path / "report.html").read_text()
    assert "global batch: 1 micro-batch x 1 replica x 4 images = 4 images a step" in page
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [1, 2, 3]
    assert [one.step for one in events.Scalars("validation/accuracy")] == [2, 3]
    assert events.Tags()["images"] == ["run/loss"]
