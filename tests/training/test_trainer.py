"""Training loop in a single process; other layouts are compared with it in tests/mpi."""

from __future__ import annotations

import csv
import json
import multiprocessing
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.loader import sample_order, to_input
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.data.synthetic_masks import SyntheticMasks
from spatialdl.training import signals
from spatialdl.training.network.building import build_model
from spatialdl.training.trainer import Trainer
from tests.fitting import check_validations, fit

TINY = [
    "model.width=2",
    "data.image_size=[40,36]",
    "data.num_classes=3",
    "data.samples=10",
    "data.validation_samples=5",
    "data.batch_size=4",
    "trainer.precision=float64",
    "trainer.max_steps=3",
    "device=cpu",
]


def config(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", [*TINY, *overrides])


def train(run_dir: Path, *overrides: str) -> Trainer:
    trainer = Trainer(config(*overrides), SingleProcess())
    fit(trainer, run_dir)
    return trainer


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def batch(samples: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    images = SyntheticDataset(10, (40, 36), num_classes=3, seed=seed)
    x = torch.stack(
        [
            to_input(torch.from_numpy(images.read(n)[None]), torch.float64, torch.device("cpu"))[0]
            for n in samples
        ]
    )
    return x, torch.from_numpy(images.labels[samples])


def test_a_run_leaves_a_loss_and_a_row_a_step(tmp_path):
    trainer = train(tmp_path)
    rows = table(tmp_path / "metrics.csv")
    loss = summary(tmp_path)["loss"]
    assert trainer.progress.step == trainer.parts.steps == len(loss) == len(rows) == 3
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == loss
    assert [float(row["learning_rate"]) for row in rows] == [0.05] * 3
    assert summary(tmp_path)["world_size"] == 1
    assert len(summary(tmp_path)["peak_memory_mb"]) == 1


def decaying(parameters):
    """As the optimizers' configurations have it: weights decay, norms and biases do not."""
    parameters = list(parameters)
    weights = [one for one in parameters if one.dim() > 1]
    others = [one for one in parameters if one.dim() <= 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def test_the_losses_are_those_of_a_plain_loop(tmp_path):
    settings = config("scheduler=cosine", "optimizer=adamw", "parallel.microbatches=2")
    trainer = Trainer(settings, SingleProcess())
    model = build_model(config(), trainer.parts.sources).double()
    fit(trainer, tmp_path)
    optimizer = torch.optim.AdamW(decaying(model.parameters()), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    order = sample_order(10, 0, 0).tolist()
    losses, rates = [], []
    for samples in (order[:4], order[4:8], order[8:]):
        optimizer.zero_grad()
        total = 0.0
        middle = len(samples) // 2
        for part in (samples[:middle], samples[middle:]):
            x, target = batch(part)
            loss = F.cross_entropy(model(x), target) * len(part) / len(samples)
            loss.backward()
            total += loss.item()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        losses.append(total)
    assert summary(tmp_path)["loss"] == pytest.approx(losses, abs=1e-12)
    rows = table(tmp_path / "metrics.csv")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(rates)
    ours = trainer.parts.pipeline.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 2, 3])  # the last batch of 5 samples holds 1
def test_validation_counts_every_sample_once(tmp_path, microbatches):
    trainer = train(tmp_path, f"parallel.microbatches={microbatches}")
    (row,) = table(tmp_path / "validation.csv")
    with torch.no_grad():
        x, target = batch(list(range(5)), seed=1)
        output = trainer.parts.pipeline.stages[0].eval()(x)
    assert int(row["step"]) == 3
    assert int(row["samples"]) == 5
    assert float(row["loss"]) == pytest.approx(F.cross_entropy(output, target).item())
    assert float(row["accuracy"]) == pytest.approx((output.argmax(1) == target).double().mean())


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [3]),
        (["trainer.validate_every=2"], [2, 3]),
        (["trainer.validate_every=1"], [1, 2, 3]),
        (["trainer.max_steps=5"], [3, 5]),  # epochs of 3 steps
        (["data.validation_samples=0"], []),
    ],
)
def test_validation_comes_when_it_is_due_and_at_the_end_once(tmp_path, overrides, steps):
    train(tmp_path, *overrides)
    file = tmp_path / "validation.csv"
    assert ([int(row["step"]) for row in table(file)] if file.exists() else []) == steps


def test_validation_changes_nothing(tmp_path):
    often, never = tmp_path / "often", tmp_path / "never"
    train(often, "trainer.validate_every=1")
    train(never, "data.validation_samples=0")
    assert summary(often)["loss"] == summary(never)["loss"]


@pytest.mark.parametrize(
    ("steps", "epochs", "made"), [(2, "null", 2), ("null", 2, 6), (4, 1, 3), (4, 2, 4)]
)
def test_the_shorter_limit_ends_the_run(tmp_path, steps, epochs, made):
    limits = (f"trainer.max_steps={steps}", f"trainer.max_epochs={epochs}")
    train(tmp_path, *limits, "data.validation_samples=0")
    rows = table(tmp_path / "metrics.csv")
    assert len(rows) == made
    assert [int(row["epoch"]) for row in rows] == [step // 3 for step in range(made)]


AUGMENTED = ["data/augment=pathology", "data.augment.blur=2", "trainer.max_steps=7"]


def test_an_augmented_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    train(whole, *AUGMENTED)
    trainer = train(half, *AUGMENTED, "trainer.max_steps=4", "data.validation_samples=0")
    assert (trainer.progress.epoch, trainer.progress.batch) == (1, 1)
    seen = summary(half)["loss"]
    train(half, *AUGMENTED, "ckpt_path=latest")
    assert summary(half)["loss"] == summary(whole)["loss"]
    train(tmp_path / "plain", "trainer.max_steps=7")
    assert summary(tmp_path / "plain")["loss"][0] != seen[0]


def test_processes_that_read_change_nothing(tmp_path):
    train(tmp_path / "none", *AUGMENTED)
    train(tmp_path / "some", *AUGMENTED, "data.workers=2")
    none, some = summary(tmp_path / "none"), summary(tmp_path / "some")
    assert none["loss"] == some["loss"]
    assert none["validation"] == some["validation"]
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_the_same_seed_gives_the_same_run(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tmp_path / name, f"seed={seed}", "trainer.max_steps=2")
    a, b, c = (summary(tmp_path / name)["loss"] for name in "abc")
    assert a == b != c


def test_a_network_learns_the_stripes(tmp_path):
    train(
        tmp_path,
        "data.samples=24",
        "data.num_classes=2",
        "data.batch_size=8",
        "trainer.max_steps=24",
        "model.width=4",
    )
    loss = summary(tmp_path)["loss"]
    assert sum(loss[-3:]) < 0.7 * sum(loss[:3])


SEGMENTED = ["model=unet", "++model.width=2", "++model.depth=2"]


def masked_batch(samples: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    images = SyntheticMasks(10, (40, 36), num_classes=3, seed=seed)
    x = torch.stack(
        [
            to_input(torch.from_numpy(images.read(n)[None]), torch.float64, torch.device("cpu"))[0]
            for n in samples
        ]
    )
    return x, torch.stack([torch.from_numpy(images.read_mask(n)).long() for n in samples])


def test_segmentation_s_losses_are_those_of_a_plain_loop(tmp_path):
    settings = config(*SEGMENTED, "parallel.microbatches=2")
    trainer = Trainer(settings, SingleProcess())
    model = build_model(settings, trainer.parts.sources).double()
    fit(trainer, tmp_path)
    optimizer = torch.optim.SGD(
        decaying(model.parameters()), lr=0.05, momentum=0.9, weight_decay=1e-4
    )
    order = sample_order(10, 0, 0).tolist()
    losses = []
    for samples in (order[:4], order[4:8], order[8:]):
        optimizer.zero_grad()
        total = 0.0
        middle = len(samples) // 2
        for part in (samples[:middle], samples[middle:]):
            x, target = masked_batch(part)
            loss = F.cross_entropy(model(x), target) * len(part) / len(samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    assert summary(tmp_path)["loss"] == pytest.approx(losses, abs=1e-12)
    (row,) = table(tmp_path / "validation.csv")
    with torch.no_grad():
        x, target = masked_batch(list(range(5)), seed=1)
        output = model.eval()(x)
    assert float(row["loss"]) == pytest.approx(F.cross_entropy(output, target).item())
    assert float(row["accuracy"]) == pytest.approx((output.argmax(1) == target).double().mean())
    assert 0 < float(row["mean_iou"]) < float(row["mean_dice"]) < 1
    assert len(summary(tmp_path)["validation"][0]["dice"]) == 3


def test_a_u_net_learns_the_discs(tmp_path):
    train(
        tmp_path,
        *(*SEGMENTED, "++model.width=4", "data.samples=16", "trainer.max_steps=16"),
        *("data.validation_samples=0", "optimizer.lr=0.1"),
    )
    loss = summary(tmp_path)["loss"]
    assert sum(loss[-3:]) < 0.7 * sum(loss[:3])


def test_a_network_of_the_other_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"use task=segmentation"):
        train(tmp_path, *SEGMENTED, "task=classification")
    with pytest.raises(ValueError, match=r"use task=classification"):
        train(tmp_path, "task=segmentation")


def test_accumulated_batches_are_one_batch(tmp_path):
    """As in Lightning: a step accumulates several batches of `data.batch_size`."""
    whole = train(tmp_path / "whole", "parallel.microbatches=2", "optimizer.scale_lr=linear")
    accumulated = train(
        tmp_path / "parts",
        *("data.batch_size=2", "trainer.accumulate=2", "optimizer.scale_lr=linear"),
    )
    assert summary(tmp_path / "parts")["loss"] == summary(tmp_path / "whole")["loss"]
    assert accumulated.progress.step == whole.progress.step == 3
    ours, expected = accumulated.parts.pipeline.state_dict(), whole.parts.pipeline.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    # of one batch at a time are activations held
    kinds = [action.kind for action in accumulated.parts.pipeline.schedule.train[0]]
    assert kinds == ["forward", "backward"] * 2


def test_averaged_weights_are_validated_and_the_others_trained(tmp_path):
    plain = train(tmp_path / "plain")
    averaged = train(tmp_path / "averaged", "trainer.ema=0.7")
    assert summary(tmp_path / "averaged")["loss"] == summary(tmp_path / "plain")["loss"]
    ours, expected = averaged.parts.pipeline.state_dict(), plain.parts.pipeline.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    model = build_model(config(), averaged.parts.sources).double().eval()
    model.load_state_dict(ours | averaged.parts.update.average.state_dict())
    x, target = batch(list(range(5)), seed=1)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), target)
    found = summary(tmp_path / "averaged")["validation"][-1]["loss"]
    assert found == pytest.approx(loss.item(), abs=1e-12)
    assert found != summary(tmp_path / "plain")["validation"][-1]["loss"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_trains_as_a_plain_loop_does(tmp_path, precision):
    trainer = train(tmp_path, f"trainer.precision={precision}", "trainer.max_steps=2")
    model = build_model(config(), trainer.parts.sources)
    optimizer = torch.optim.SGD(
        decaying(model.parameters()), lr=0.05, momentum=0.9, weight_decay=1e-4
    )
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed")
    order = sample_order(10, 0, 0).tolist()
    losses, scales = [], []
    for samples in (order[:4], order[4:8]):
        optimizer.zero_grad()
        x, target = batch(samples)
        with torch.autocast("cpu", trainer.parts.precision.mixed):
            loss = F.cross_entropy(model(x.float()), target)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert summary(tmp_path)["loss"] == losses
    ours = trainer.parts.pipeline.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
    rows = table(tmp_path / "metrics.csv")
    if precision == "fp16-mixed":
        assert [float(row["loss_scale"]) for row in rows] == scales
        assert {int(row["skipped"]) for row in rows} <= {0, 1}
    else:
        assert "loss_scale" not in rows[0]


def test_deterministic_runs_have_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = ["trainer.deterministic=true", "trainer.precision=float32"]
    try:
        one = train(tmp_path / "one", *options)
        assert torch.are_deterministic_algorithms_enabled()
        two = train(tmp_path / "two", *options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert summary(tmp_path / "one")["loss"] == summary(tmp_path / "two")["loss"]
    ours, again = one.parts.pipeline.state_dict(), two.parts.pipeline.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in again.items())


def test_channels_last_changes_the_order_in_memory_only(tmp_path):
    plain = train(tmp_path / "plain")
    last = train(tmp_path / "last", "trainer.channels_last=true")
    weights = [p for p in last.parts.pipeline.parameters() if p.dim() == 4 and p.shape[2] > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    ours, expected = last.parts.pipeline.state_dict(), plain.parts.pipeline.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)


def test_what_is_frozen_stays_and_the_rest_is_that_of_a_plain_loop(tmp_path):
    start = build_model(config(), Trainer(config(), SingleProcess()).parts.sources)
    torch.save({"state_dict": start.state_dict()}, tmp_path / "start.pt")
    settings = config(
        "seed=5",
        f"weights={tmp_path / 'start.pt'}",
        "trainer.freeze=[conv1.*,bn1.*,layer1.*]",
        "task.class_weights=[1,2,0.5]",
        "task.label_smoothing=0.2",
    )
    trainer = Trainer(settings, SingleProcess())
    fit(trainer, tmp_path / "run")
    model = start.double().train()
    still = (model.conv1, model.bn1, model.layer1)
    for module in still:
        module.requires_grad_(False).eval()
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(decaying(learning), lr=0.05, momentum=0.9, weight_decay=1e-4)
    weight = torch.tensor([1, 2, 0.5], dtype=torch.float64)
    order = sample_order(10, 5, 0).tolist()
    losses = []
    for samples in (order[:4], order[4:8], order[8:]):
        optimizer.zero_grad()
        x, target = batch(samples, seed=5)
        loss = F.cross_entropy(model(x), target, weight, label_smoothing=0.2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert summary(tmp_path / "run")["loss"] == pytest.approx(losses, abs=1e-12)
    ours = trainer.parts.pipeline.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)


def test_predictions_of_the_last_validation_are_written(tmp_path):
    trainer = train(tmp_path, "trainer.validate_every=1")
    with torch.no_grad():
        x, target = batch(list(range(5)), seed=1)
        output = trainer.parts.pipeline.stages[0].eval()(x)
    rows = table(tmp_path / "predictions.csv")
    assert [int(row["sample"]) for row in rows] == list(range(5))
    assert [int(row["label"]) for row in rows] == target.tolist()
    shares = [[float(row[f"probability_{c}"]) for c in range(3)] for row in rows]
    torch.testing.assert_close(torch.tensor(shares).double(), output.softmax(1))


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
    assert page.count("<figure>") == 5
    assert "global batch: 1 micro-batch x 1 replica x 4 images = 4 images a step" in page
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert [one.step for one in events.Scalars("train/loss")] == [1, 2, 3]
    assert [one.step for one in events.Scalars("validation/accuracy")] == [2, 3]
    assert tags["images"] == [*(f"validation/{n}" for n in range(5)), "run/loss"]
    assert [one.step for one in events.Images("validation/0")] == [2, 3]


def _as_it_is(function, **options):
    return function


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_run_has_the_same_numbers_and_names_and_resumes(real, tmp_path, monkeypatch):
    if not real:
        monkeypatch.setattr(torch, "compile", _as_it_is)
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    more = ("trainer.max_steps=5", "trainer.freeze=[conv1.*]", "trainer.ema=0.9")
    expected = train(plain, *more).parts.pipeline
    train(ours, *more, "trainer.max_steps=3", "trainer.compile=true")
    found = train(ours, *more, "trainer.compile=true", "ckpt_path=latest").parts.pipeline
    assert summary(ours)["loss"] == pytest.approx(summary(plain)["loss"], abs=1e-10)
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], value, rtol=0, atol=1e-10), name
    train(ours, *more, "trainer.max_steps=6", "ckpt_path=latest")  # uncompiled from here on


KINDS = {
    "classification": ["model.width=8"],
    "segmentation": ["task=segmentation", "model=unet", "model.width=8", "model.depth=2"],
}


@pytest.mark.parametrize("stream", ["[2,2]", "[3,1]", "[1,1]"])
@pytest.mark.parametrize("task", KINDS)
def test_a_run_on_virtual_tiles_equals_the_one_without(task, stream, tmp_path):
    """Activations are offloaded to disk."""
    words = [*KINDS[task], "data.image_size=[70,67]", "data/augment=pathology", "trainer.ema=0.5"]
    words += ["trainer.validate_every=2", "parallel.microbatches=2", "trainer.clip_norm=1"]
    plain = train(tmp_path / "plain", *words)
    limit = ["trainer.memory_limit_gb=0.001", f"parallel.stream_to={tmp_path}"]
    ours = train(tmp_path / "ours", *words, f"parallel.stream={stream}", *limit)
    found, expected = summary(tmp_path / "ours"), summary(tmp_path / "plain")
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    assert len(found["validation"]) == len(expected["validation"]) == 2
    check_validations(found["validation"], expected["validation"])
    state = ours.parts.pipeline.state_dict()
    for name, value in plain.parts.pipeline.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
    store = ours.parts.pipeline.options.memory.store
    assert store.written > 4_000_000
    assert store.folder == tmp_path


def test_a_run_that_is_told_to_stop_gives_up_a_step_on_virtual_tiles(tmp_path, monkeypatch):
    """A step may outlast the grace period of a scheduler; it is discarded and repeated."""
    words = [*KINDS["classification"], "data.image_size=[64,64]", "parallel.stream=[2,2]"]
    whole = train(tmp_path / "whole", *words)
    monkeypatch.setattr(signals._Seen, "first", None)
    operations = count()

    def seen() -> bool:
        if next(operations) == 20_000:  # in the midst of the second step
            signals._Seen.first = signal.SIGTERM
        return signals._Seen.first is not None

    with monkeypatch.context() as within:
        within.setattr(signals, "seen", seen)
        stopped = train(tmp_path / "ours", *words)
    done = stopped.progress.step
    assert next(operations) == 20_001  # it did not even end the operation
    assert 0 < done < whole.progress.step
    assert stopped.progress.stopped is signal.SIGTERM
    monkeypatch.setattr(signals._Seen, "first", None)
    ours = train(tmp_path / "ours", *words, "ckpt_path=latest")
    assert summary(tmp_path / "ours")["loss"] == summary(tmp_path / "whole")["loss"]
    state = ours.parts.pipeline.state_dict()
    for name, value in whole.parts.pipeline.state_dict().items():
        assert torch.equal(state[name], value), name
