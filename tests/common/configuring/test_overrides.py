"""Words and values that no configuration has are refused with the nearest."""

from __future__ import annotations

import re

import pytest

from spatialdl.common.configuring.keys import file_of, groups, keys_of
from spatialdl.common.configuring.overrides import ELSEWHERE, check_overrides, flags_of
from spatialdl.common.configuring.values import check_values
from tests.composing import composed

MODELS = "choices: abmil, amoebanet_d, bag_pooling, bag_transformer, clam, end_to_end"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("optimzer.lr=1", "optimzer.lr is unknown; nearest: optimizer.lr; `python -m spatialdl"),
        ("model=resnet19", f"model=resnet19 is unknown; nearest: model=resnet18; {MODELS}"),
        ("parallel=sp+ppp", "parallel=sp+ppp is unknown; nearest: parallel=sp+pp; choices: auto"),
        ("parallel.gems.varint=x", "nearest: parallel.gems.variant;"),
        ("parallel.balance=memory", "parallel.balance is no longer there: use parallel.cut"),
        ("logger=[csv,tensorbord]", "logger=tensorbord is unknown; nearest: logger=tensorboard;"),
        ("batch_size=3", "batch_size is unknown; nearest: data.batch_size;"),
        ("+foo=1", "+foo is unknown; `python"),
        ("+seed=1", "+seed: seed already exists, omit the +"),
        ("+model=unet", "+model: model is already chosen, omit the +"),
        ("data.path=x", "a key of data=shards, but data=synthetic is chosen: add data=shards"),
        ("parallel.world=2", "parallel=auto, but parallel=none is chosen"),
        ("data.image_size.2=3", "data.image_size.2 is unknown"),
        ("++model.widht=3", "model.widht is unknown to spatialdl.models.resnet18; nearest: model."),
        (  # its module has the same name
            "model=unet ++model.widht=3",
            "model.widht is unknown to spatialdl.models.unet; nearest: model.w",
        ),
        ("optimizer.momentun=1", "unknown to torch.optim.SGD; nearest: optimizer.momentum;"),
        ("optimizer.maximize=true", "to pass torch.optim.SGD another argument write +optimizer.m"),
        ("+optimizer.nesterv=true", "unknown to torch.optim.SGD; nearest: optimizer.nesterov"),
        ("optimizer._target_=torch.optim.RMSprop +optimizer.alpah=1", "nearest: optimizer.alpha"),
        ("cluster=infiniband", "cluster is not a group of spatialdl.train "),
        ("model=networks.Net", "; for your own use model._target_=networks.Net"),
        ("hydra.run.dri=x", "hydra.run.dri is unknown; nearest: hydra.run.dir"),
        ("seed", "seed has no value: write seed=value"),
        ("optimizer.learning_rate=1", "unknown to torch.optim.SGD; nearest: optimizer.lr;"),
        ("gradient_clip_val=1", "gradient_clip_val is unknown; nearest: trainer.clip_norm;"),
        ("=3", "=3 has no key: write key=value"),
        ("parallel.grid=[2", "parallel.grid=[2 cannot be parsed as key=value"),
        ("seed=1,2", "seed=1,2 has several values: add --multirun"),
        ("parallel.gems={varint:x}", "the configuration cannot be composed: "),
        ("hydra.output_subdir=x", "hydra.output_subdir=x is not supported: overrides and"),
        ("optimizer.nesterov=true", "torch.optim.SGD another argument write +optimizer.nesterov="),
        ("+optimizer.scale_lr=linear", "optimizer.scale_lr is no longer there: use the learning"),
        ("data=fractals", "data=fractals is no longer there: use experiment=volumes"),
        ("data.io=mmap", "data.io is no longer there: use the command without it, as shards"),
        ("parallel.late=tensor", "use parallel.local_dp=N, or parallel.tensor=[1,N]"),
        ("hydra/job_logging=default", "hydra.job_logging.handlers.file writes to a file, but the"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest(words, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        check_overrides(words.split())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "seed=1 ++seed=2 data.image_size=[1,2] data.image_size.0=3",
        "data=shards data.path=x",
        "experiment=quickstart model=resnet50 parallel=auto parallel.world=2",
        "++model._target_=networks.Network ++model.anything=3",
        "+optimizer.maximize=true",
        "data=shards data.path=x data.stage.to=off ckpt_path=latest weights=x.pt",
        "data=shards data.path=x data/augment=light data.augment.flip=0 task=multilabel",
        "model=unet task.dice=1 scheduler=one_cycle scheduler.pct_start=0.2 trainer.freeze=[a.*]",
        "optimizer._target_=torch.optim.RMSprop +optimizer.alpha=0.9",
        "hydra.run.dir='ab' hydra.output_subdir=null hydra.job.num=3",
        "hydra/job_logging=disabled hydra.verbose=true hydra.job.chdir=true",
    ],
)
def test_what_is_known_passes(words):
    check_overrides(words.split())


def test_a_sweep_is_looked_through():
    check_overrides(["parallel=dp,none", "seed=1,2", "data=glob(s*)"], multirun=True)
    with pytest.raises(ValueError, match=r"parallel=non is unknown; nearest: parallel=none"):
        check_overrides(["parallel=dp,non"], multirun=True)
    with pytest.raises(ValueError, match=r"data\.path is a key of data=shards"):
        check_overrides(["data=shards,synthetic", "data.path=x"], multirun=True)
    with pytest.raises(ValueError, match=r"hydra\.output_subdir=x"):
        check_overrides(["seed=1,2", "hydra.output_subdir=x"], multirun=True)


def test_the_planner_has_keys_of_its_own():
    check_overrides(["world=2", "cluster=infiniband", "cluster.memory_gb=40"], "plan")
    with pytest.raises(ValueError, match=r"^world is unknown"):
        check_overrides(["world=2"])


def test_configurations_of_the_users_are_known(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.yaml").write_text("_target_: mine.Net\nwidth: 5\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "some.yaml").write_text("# @package _global_\nseed: 3\n")
    folder = str(tmp_path)
    check_overrides(["model=net", "model.width=3", "++model.more=1"], config_dir=folder)
    check_overrides(["+mine=some"], config_dir=folder)
    check_overrides([f"hydra.searchpath=[file://{folder}]", "model=net"])
    with pytest.raises(ValueError, match=r"model=nett is unknown; nearest: model=net"):
        check_overrides(["model=nett"], config_dir=folder)
    with pytest.raises(ValueError, match=r"model=net is unknown"):
        check_overrides(["model=net"])
    with pytest.raises(ValueError, match=r"nowhere is not a directory"):
        check_overrides([], config_dir=f"{folder}/nowhere")


@pytest.mark.parametrize(
    ("word", "nearest"), [("--multirn", "--multirun"), ("--hlep", "--help"), ("-x", None)]
)
def test_a_flag_that_is_unknown_is_refused_with_the_nearest(word, nearest):
    with pytest.raises(ValueError, match=re.escape(f"{word} is unknown")) as refusal:
        flags_of([word, "seed=1"])
    assert nearest is None or f"nearest: {nearest};" in str(refusal.value)
    with pytest.raises(ValueError, match="nearest: --calibrate;"):
        flags_of(["--calibrat"], "plan")
    with pytest.raises(ValueError, match="seed=1,2 follows a flag"):
        flags_of(["parallel=sp", "-m", "seed=1,2"])
    assert flags_of(["--cfg", "job", "seed=1"]).overrides == ["seed=1"]


def test_what_others_call_it_is_a_key_here():
    choices = [(group, choice) for group, names in groups().items() for choice in names]
    known = {key.name for one in choices for key in keys_of(file_of(*one))}
    assert set(ELSEWHERE.values()) - known <= {"weights", "ckpt_path", "device", "parallel"}


@pytest.mark.parametrize("text", ["a: [", "\0", "a: &a [*a]\n- b", "a: *b", "defaults: 3"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text):
    """PyYAML's errors are none of Hydra's, and ended the command with a traceback."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"cannot be composed: .+|must be a list"):
        check_overrides(["model=mine"], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("comm.map=ture", "comm.map=ture must be true or false"),
        ("comm.check=null", "comm.check=null must be true or false"),
        ("parallel.sync_batchnorm=1", "parallel.sync_batchnorm=1 must be true or false"),
        ("data.samples=2.5", "data.samples=2.5 must be a whole number"),
        ("data.samples=true", "data.samples=true must be a whole number"),
        ("trainer.max_steps=1e3", "trainer.max_steps=1000.0 must be a whole number, or null"),
        ("trainer.clip_norm=on", "trainer.clip_norm=on must be a number, or null"),
        ("optimizer.lr=fast", "optimizer.lr=fast must be a number"),
        ("optimizer.lr=nan", "optimizer.lr=nan must be a number"),
        ("scheduler=cosine scheduler.T_max=[3]", "T_max=[3] must be a whole number, or null"),
        ("model.width=wide", "model.width=wide must be a whole number"),
        ("task.mixup={a:1}", "task.mixup={'a': 1} must be a number"),
    ],
)
def test_what_is_no_switch_or_number_is_refused(override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_values(composed("train", *override.split()))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1 comm.timeout=2.5 trainer.clip_norm=null trainer.max_epochs=3",
        "trainer.max_steps=${data.samples}",
        "seed=${hydra:job.num}",  # which cannot be told yet
        "++model._target_=mine.Network model.width=wide",
        "scheduler=one_cycle +scheduler.div_factor=2.5 scheduler.max_lr=1",
        "data=shards data.num_classes=null",
        "model=unet model.depth=3",
        "parallel=lp parallel.tensor=[1,2]",  # was refused, as the default is a number
    ],
)
def test_what_is_one_passes(override):
    check_values(composed("train", *override.split()))


def test_each_command_has_its_own_keys():
    check_values(composed("predict", "ckpt_path=run"))
    with pytest.raises(ValueError, match="maps=ture must be true or false"):
        check_values(composed("predict", "ckpt_path=run", "maps=ture"))
