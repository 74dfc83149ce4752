"""Every file of the configuration is made into what it stands for; one that nothing here knows
how to make fails.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from spatialdl.cli.slurm_runs import resources
from spatialdl.common.configuring.keys import keys_of
from spatialdl.data import ShardWriter
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.setup import cluster_file
from spatialdl.training.checks import BACKENDS, TRANSPORTS, check_config
from spatialdl.training.layouts import placement_of
from spatialdl.training.loggers import Loggers, check_loggers
from spatialdl.training.optimization.optimizers import make_optimizer, make_scheduler
from spatialdl.training.settings import open_sources
from spatialdl.training.tasks.task import task_of
from tests.bags import TILE, WIDTH, write_bags, write_tile_bags
from tests.composing import compose_anew, composed
from tests.data import own_datasets
from tests.fitting import train
from tests.test_end_to_end import small_preset

CONF = Path(str(files("spatialdl.conf")))


def config(*overrides: str) -> DictConfig:
    return composed("train", *overrides)


SMALL = {
    "amoebanet_d": ["model.layers=3", "model.filters=16"],
    "unet3d": ["model.width=2", "model.depth=2"],
    "vit": ["model.width=12", "model.depth=2", "model.heads=3", "model.patch=4"],
}
BAGS = ("abmil", "bag_pooling", "bag_transformer", "clam", "transmil")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of tiles."""
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path / "tiles", classes=["benign", "tumour"]) as writer:
        for number in range(6):
            image = rng.integers(0, 256, (40, 36, 3), np.uint8)
            writer.add(image, label=number % 2, split="train" if number < 4 else "val")
    return tmp_path / "tiles"


# --- every file, group by group


def make_model(name: str, folder: Path) -> None:
    words, pixels, shape = [], torch.zeros(2, 1, 16, 16), (2, 4)
    if name == "end_to_end":
        words = ["data=rare_tiles", "data.tile=[3,8,8]", "data.tile_channels=3", "data.scale=255"]
        pixels, shape = torch.zeros(1, 192, 7, dtype=torch.uint8), (1, 4)
    elif name in BAGS:
        words, pixels, shape = ["data=bags", "data.channels=5"], torch.zeros(1, 5, 7), (1, 4)
    else:
        words = ["data.channels=1", *SMALL.get(name, ["model.width=2"])]
    if name.endswith("3d"):
        pixels = torch.zeros(2, 1, 16, 16, 16)
    cfg = config(*words, f"model={name}", "data.num_classes=4")
    if cfg.task.name == "segmentation":
        shape = (*shape, *pixels.shape[2:])
    network = instantiate(cfg.model).eval()
    assert network(pixels).shape == shape


def make_data(name: str, folder: Path) -> None:
    if name == "bags":
        bags = write_bags(folder.parent / "bags")
        given = [f"data.features={bags}", f"data.labels={bags / 'labels.csv'}"]
        sources = open_sources(config("data=bags", *given).data, 0)
        assert (sources.channels, sources.num_classes) == (WIDTH, 3)
        return
    if name == "tile_bags":
        tiles = write_tile_bags(folder.parent / "bags") / "tiles"
        sources = open_sources(config("data=tile_bags", f"data.tiles={tiles}").data, 0)
        assert (sources.channels, sources.num_classes) == (prod(TILE), 3)
        return
    if name == "rare_tiles":
        sources = open_sources(config("data=rare_tiles", "data.slides=3").data, 0)
        assert (sources.image_size, len(sources.train), sources.num_classes) == ((16,), 3, 2)
        return
    given = [f"data.path={folder}"] if name == "shards" else ["data.image_size=[40,36]"]
    shape: tuple[int, ...] = (40, 36, 3)
    if name == "dataset":
        given = [f"data.dataset._target_={own_datasets.__name__}.Noise", "data.num_classes=2"]
        given += ["++data.validation.split=val"]
        shape = (21, 18, 3)
    cfg = config(f"data={name}", *given)
    assert not OmegaConf.missing_keys(cfg)
    sources = open_sources(cfg.data, 0, cfg.task.name)
    assert sources.train.read(0).shape == shape
    assert sources.validation is not None
    assert {"image_size", "channels", "num_classes", "batch_size"} <= set(cfg.data)


def make_task(name: str, folder: Path) -> None:
    cfg = config(f"task={name}")
    settings, source = cfg.task, SyntheticDataset(3, (8, 8), 3)
    if name == "survival":
        source.labels = np.array([[time, 1.0] for time in range(6)])
    made = task_of(settings, 3, source)
    assert made.name == settings.name == name
    assert made.mixup == settings.get("label_smoothing", 0) == settings.get("dice", 0) == 0
    assert settings.get("class_weights") is settings.get("pos_weight") is None


def make_augmentation(name: str, folder: Path) -> None:
    cfg = config(f"data/augment={name}", "data.image_size=[24,20]")
    views = open_sources(cfg.data, 0).train_views
    changed = (views.read(0, 0, (0, 24, 0, 20)) != views.source.read(0)).any()
    assert changed == (name != "none")


def make_parallel(name: str, folder: Path) -> None:
    cfg = config(f"parallel={name}").parallel
    if name == "auto":
        assert set(cfg) == {*config().parallel, "world", "device_memory_gb", "cluster"}
        return
    assert placement_of(cfg).world_size == 1


def make_steps(name: str, group: str) -> list[float]:
    """The learning rates of four steps."""
    cfg = config(f"{group}={name}")
    made = make_optimizer(cfg.optimizer, [nn.Parameter(torch.ones(1))])
    rule = make_scheduler(cfg.scheduler, made, 4)
    rates = []
    for _ in range(4):
        rates.append(made.param_groups[0]["lr"])
        made.step()
        rule.step()
    highest = cfg.optimizer.lr
    if name == "one_cycle":  # of which the peak lies between two steps
        assert highest / 2 < max(rates) < highest
    else:
        assert max(rates) == rates[0] == highest
    return rates


def make_scheduler_of(name: str, folder: Path) -> None:
    rates = make_steps(name, "scheduler")
    assert (rates[-1] < max(rates)) == (name != "constant")


def make_comm(name: str, folder: Path) -> None:
    comm = config(f"comm={name}").comm
    assert comm.transport in TRANSPORTS
    assert comm.backend in BACKENDS
    assert (comm.check, comm.ranks_per_device) == (False, 1)


def make_launcher(name: str, folder: Path) -> None:
    settings = config(f"launcher={name}").launcher
    assert settings.name == name
    if name == "slurm":
        assert dict(resources(settings, 3))["ntasks"] == 3
    hydra = compose_anew("train", f"launcher={name}", with_hydra=True)
    context = HydraContext(config_loader=None, callbacks=Callbacks())
    made = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=print, config=hydra
    )
    assert type(made).__name__ == {"local": "BasicLauncher", "slurm": "SlurmLauncher"}[name]


def make_cluster(name: str, folder: Path) -> None:
    settings = OmegaConf.to_container(cluster_file(name))
    if name == "this_machine":  # the rest is measured
        assert settings == {"name": name}
        return
    assert cluster_of(settings).memory_bytes(8) == (192e9 if name == "mi300x" else 80e9)


def make_run(name: str, folder: Path) -> None:
    """Two steps of a preset, small and on one rank; tests/test_end_to_end.py has its ranks."""
    (folder / "preset").mkdir()
    words = ("parallel=none", *small_preset(name, folder / "preset"))
    trainer = train(folder / "run", f"experiment={name}", *words)
    assert trainer.progress.step == 2
    assert (folder / "run" / "summary.json").is_file()


def make_debug(name: str, folder: Path) -> None:
    assert config(f"debug={name}").debug.name == name


def make_logger(name: str, folder: Path) -> None:
    cfg = config(f"logger={name}")
    pytest.importorskip("numpy" if name == "csv" else name)
    assert list(cfg.logger) == [name]
    check_loggers(cfg.logger)
    if name in ("csv", "tensorboard"):  # the others have tests of their own
        loggers = Loggers(cfg, folder, 0)
        assert set(loggers._open) == {name} - {"csv"}
        loggers.close()


MAKERS: dict[str, Callable[[str, Path], object]] = {
    "model": make_model,
    "task": make_task,
    "data": make_data,
    "data/augment": make_augmentation,
    "parallel": make_parallel,
    "optimizer": lambda name, folder: make_steps(name, "optimizer"),
    "scheduler": make_scheduler_of,
    "trainer": lambda name, folder: check_config(config(f"trainer={name}")),
    "comm": make_comm,
    "cluster": make_cluster,
    "launcher": make_launcher,
    "experiment": make_run,
    "debug": make_debug,
    "logger": make_logger,
}
FILES = sorted(file for file in CONF.rglob("*.yaml") if file.parent != CONF)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}={f.stem}")
def test_every_file_can_be_made_into_what_it_stands_for(file, folder):
    group = file.parent.relative_to(CONF).as_posix()
    assert group in MAKERS, f"nothing here makes {group}={file.stem}: write what does"
    MAKERS[group](file.stem, folder)


# --- what they promise


def test_a_u_net_segments_unless_told_otherwise():
    assert config().task.name == "classification"
    assert config("model=unet").task.name == "segmentation"
    assert config("model=unet", "task=classification").task.name == "classification"
    assert config("task=segmentation").task.name == "segmentation"
    assert config("experiment=segmentation").task.name == "segmentation"
    words = ("experiment=camelyon_like", "task.class_weights=null", "data.path=x")
    assert config(words[0], words[2]).task.class_weights == "balanced"
    assert config(*words).task.class_weights is None


def test_overfit_trains_plainly_unless_told_otherwise():
    words = ("data/augment=pathology", "task.mixup=0.4", "trainer.early_stopping.metric=loss")
    cfg = config("debug=overfit")
    assert cfg.data.augment == config().data.augment
    assert (cfg.trainer.checkpoint.keep, cfg.trainer.early_stopping.metric) == (0, None)
    cfg = config(*words, "debug=overfit")
    assert cfg.data.augment != config().data.augment
    assert (cfg.task.mixup, cfg.trainer.early_stopping.metric) == (0.4, "loss")


def test_the_users_words_win_over_a_preset():
    cfg = config("experiment=hyfi_amoebanet")
    assert (cfg.model.filters, cfg.parallel.grid, cfg.parallel.stages) == (416, [2, 2], 3)
    cfg = config("experiment=hyfi_amoebanet", "parallel=lp", "model=resnet18", "data.batch_size=3")
    assert cfg.parallel == config("parallel=lp").parallel
    assert cfg.model.width == 64
    assert cfg.data.batch_size == 3
    assert cfg.data.image_size == [2048, 2048]


@pytest.mark.parametrize(
    "file", sorted(CONF.rglob("*.yaml")), ids=lambda f: f"{f.parent.name}={f.stem}"
)
def test_a_comment_stands_beside_every_key(file):
    group = file.parent.relative_to(CONF).as_posix().partition("/")[0]
    own = group not in ("parallel", "experiment", "debug")  # these set keys that others explain
    for key in keys_of(file):
        mapping_of_hydra = key.name.partition(".")[0] == "hydra" and not key.default
        known = key.name in EXPLAINED and not own
        assert key.comment or known or mapping_of_hydra, key


EXPLAINED = {key.name for file in CONF.rglob("*.yaml") for key in keys_of(file) if key.comment}
EXPLAINED |= {group.name for group in CONF.iterdir() if group.is_dir()}
