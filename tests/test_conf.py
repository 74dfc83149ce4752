from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.models import ResNet, ResNetV2, UNet
from spatialdl.training.optimizers import make_optimizer, make_scheduler
from spatialdl.training.tasks import task_of

CONF = Path(str(files("spatialdl.conf")))
RANKS = {"none": 1, "dp": 2, "sp": 2, "lp": 2, "pp": 2, "sp+lp": 3, "sp+pp": 3} | {
    **{"dp+sp": 4, "dp+lp": 4, "dp+pp": 4, "dp+sp+lp": 6, "dp+sp+pp": 6},
    **{"gems": 2, "sp+gems": 3, "dp+gems": 4, "dp+sp+gems": 6},
}


def config(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", list(overrides))


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def test_the_groups_have_the_promised_options():
    assert options("parallel") == sorted([*RANKS, "auto"])
    assert options("cluster") == ["infiniband", "nvlink_node", "this_machine"]
    assert options("model") == ["amoebanet_d", "resnet110_v2", "resnet18", "resnet50", "unet"]
    assert options("task") == ["classification", "multilabel", "regression", "segmentation"]
    assert options("data") == ["shards", "synthetic"]
    assert options("optimizer") == ["adamw", "lamb", "lars", "sgd"]
    rules = ["constant", "cosine", "one_cycle", "polynomial", "step"]
    assert options("scheduler") == rules


@pytest.mark.parametrize("model", options("model"))
def test_every_model_takes_classes_and_channels_from_the_data(model):
    small = ["model.width=2"] if model != "amoebanet_d" else ["model.layers=3", "model.filters=16"]
    cfg = config(f"model={model}", "data.num_classes=4", "data.channels=1", *small)
    network = instantiate(cfg.model).eval()
    assert isinstance(network, nn.Sequential | ResNet | ResNetV2 | UNet)
    pixels = (16, 16) if cfg.task.name == "segmentation" else ()
    assert network(torch.zeros(2, 1, 16, 16)).shape == (2, 4, *pixels)


def test_a_u_net_segments_unless_told_otherwise():
    assert config().task.name == "classification"
    assert config("model=unet").task.name == "segmentation"
    assert config("model=unet", "task=classification").task.name == "classification"
    assert config("task=segmentation").task.name == "segmentation"


@pytest.mark.parametrize("task", options("task"))
def test_every_task_can_be_made_and_leaves_its_extras_off(task):
    settings = config(f"task={task}").task
    made = task_of(settings, 3, SyntheticDataset(3, (8, 8), 3))
    assert made.name == settings.name == task
    assert made.mixup == settings.get("label_smoothing", 0) == settings.get("dice", 0) == 0
    assert settings.get("class_weights") is settings.get("pos_weight") is None


@pytest.mark.parametrize("scheduler", options("scheduler"))
@pytest.mark.parametrize("optimizer", options("optimizer"))
def test_every_optimizer_and_scheduler_can_be_made(optimizer, scheduler):
    cfg = config(f"optimizer={optimizer}", f"scheduler={scheduler}")
    made = make_optimizer(cfg.optimizer, [nn.Parameter(torch.ones(1))], cfg.data.batch_size)
    rule = make_scheduler(cfg.scheduler, made, 4)
    rates = []
    for _ in range(4):
        rates.append(made.param_groups[0]["lr"])
        made.step()
        rule.step()
    highest = cfg.optimizer.lr
    if scheduler == "one_cycle":  # of which the peak lies between two steps
        assert highest / 2 < max(rates) < highest
    else:
        assert max(rates) == rates[0] == highest
    assert (rates[-1] < max(rates)) == (scheduler != "constant")


@pytest.mark.parametrize(("parallel", "ranks"), RANKS.items())
def test_every_layout_has_all_keys_its_name_and_its_number_of_ranks(parallel, ranks):
    cfg = config(f"parallel={parallel}").parallel
    assert cfg.name == parallel
    assert list(cfg) == list(config().parallel)
    tiles = cfg.grid[0] * cfg.grid[1]
    assert cfg.data * (cfg.spatial_stages * tiles + cfg.stages - cfg.spatial_stages) == ranks
    assert cfg.microbatches == (4 if "pp" in parallel else 2 if "gems" in parallel else 1)
    assert cfg.gems.variant == ("mast" if "gems" in parallel else "none")


@pytest.mark.parametrize("data", options("data"))
def test_every_data_config_is_whole(data):
    cfg = config(f"data={data}", *(["data.path=somewhere"] if data == "shards" else []))
    assert not OmegaConf.missing_keys(cfg)
    assert {"image_size", "channels", "num_classes", "batch_size"} <= set(cfg.data)


def test_a_key_that_does_not_exist_is_refused():
    with pytest.raises(HydraException, match=r"data\.bach_size"):
        config("data.bach_size=3")


def test_the_default_run_directory_is_new_every_time():
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        cfg = compose("train", return_hydra_config=True)
    assert cfg.hydra.run.dir.startswith("outputs/20")


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda f: f.stem)
def test_a_comment_stands_beside_every_key(file):
    explained = (CONF / "parallel/none.yaml").read_text() if file.parent.name == "parallel" else ""
    for line in file.read_text().splitlines():
        key = line.partition(":")[0]
        top_level = key and not key.startswith((" ", "#")) and key not in ("defaults", "hydra")
        if top_level:
            assert "  # " in line or f"{key}: " in explained, line
