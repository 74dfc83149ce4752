"""Check command-line overrides; unknown ones are refused with the nearest known.

Runs before anything else: Hydra's own messages lack suggestions, and Hydra accepts unknown keys
after ``+`` although no code reads them.
"""

from __future__ import annotations

import inspect
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import product
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, ValueType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spatialdl.common.configuring.keys import chosen_by_default, file_of, groups, keys_of
from spatialdl.common.configuring.own_keys import named

ELSEWHERE = {
    "accelerator": "device",
    "accumulate_grad_batches": "trainer.accumulate",
    "classes": "data.num_classes",
    "devices": "parallel.data",
    "gpus": "parallel.data",
    "gradient_clip_val": "trainer.clip_norm",
    "learning_rate": "optimizer.lr",
    "loss": "task.loss",
    "monitor": "trainer.checkpoint.best",
    "parts": "parallel.microbatches",
    "pretrained": "weights",
    "resume": "ckpt_path",
    "strategy": "parallel",
}
"""Names in other frameworks, where no key here is similar."""

REMOVED = {
    "debug=detect_nan": "the command without it, as every run stops at NaN and names the layer",
    "trainer.stop_on_nan": "the command without it, as every run stops at NaN and names the layer",
    **{
        f"logger.{name}.images": "spatialdl.evaluate, which draws the worst samples; loggers get "
        "the pictures of the run"
        for name in ("tensorboard", "wandb", "mlflow")
    },
    "parallel.balance": "parallel.cut for other stages than those balanced by operation counts",
    "parallel.gems.times": "parallel.gems.variant=master, which alternates every two micro-batches",
    "trainer.validate_every_epochs": "trainer.validate_every with a number of steps",
    "trainer.checkpoint.every_epochs": "trainer.checkpoint.every_steps; null: after each epoch",
    "trainer.early_stopping.min_delta": "trainer.early_stopping.patience, as every improvement "
    "counts",
    "trainer.compile": "the command without it, which compiled only stages that split no image",
    "optimizer.base_batch": "the learning rate of your batch, optimizer.lr",
    "optimizer.scale_lr": "the learning rate of your batch, optimizer.lr",
    "parallel.late": "parallel.local_dp=N, or parallel.tensor=[1,N] with a number for each stage",
    "scheduler.warmup_epochs": "scheduler.warmup_steps",
    "trainer.checkpoint.local": "the command without it, as checkpoints are written while training "
    "continues",
    "data=fractals": "experiment=volumes",
    "experiment=volume_fractals": "experiment=volumes",
    "data.io": "the command without it, as shards are read by pread alone",
    "data.prefetch": "the command without it, which reads two batches ahead",
}
"""What replaces keys and choices of earlier versions."""

OWN = ("task.loss", "data.validation")
"""Keys that hold a name or null, unless a user sets their ``_target_``."""

_AS = {"data.validation": "data.dataset"}
"""Keys that inherit the ``_target_`` of another key."""

_OF_FILES = (YAMLError, AttributeError, TypeError, KeyError, AssertionError, RecursionError)
"""Errors of PyYAML and Hydra on the user's files that are no valid configurations."""


def flags_of(arguments: Sequence[str], command: str = "train") -> Namespace:
    """Parse the flags of a command line, and its overrides.

    Raises:
        ValueError: unknown flag; the message suggests the nearest.
    """
    parser = get_args_parser()
    flags, unknown = parser.parse_known_args(list(arguments))
    if unknown and re.match(r"[^-=]+=", unknown[0]):
        raise ValueError(
            f"{unknown[0]} follows a flag that follows other keys: write flags such as -m before "
            "all keys"
        )
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        known += ["--help", *(["--calibrate"] if command == "plan" else [])]
        word = unknown[0].partition("=")[0]
        raise ValueError(
            f"{unknown[0]} is unknown{_perhaps(word, known)}; keys are written as "
            f"key=value, and `python -m spatialdl.{command} --help` lists all"
        )
    if getattr(flags, "experimental_rerun", None) is not None:
        raise ValueError(
            "--experimental-rerun unpickles files of a run directory, which may execute arbitrary "
            "code: pass the overrides in its .hydra/overrides.yaml instead"
        )
    return flags


def check_overrides(
    overrides: Sequence[str],
    command: str = "train",
    config_name: str | None = None,
    config_dir: str | None = None,
    multirun: bool = False,
) -> None:
    """Refuse unknown keys, groups and choices.

    Args:
        overrides: arguments of the command, also those of a sweep.
        command: "train", "plan", "predict" or "evaluate".
        config_name: name of the user's own main file, if any.
        config_dir: directory of the user's own configurations.
        multirun: whether comma-separated values are a sweep.

    Raises:
        ValueError: unknown word; the message has the nearest known one, and how to list all.
    """
    _Check(overrides, command, config_name or command, config_dir).run(multirun)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the configuration cannot be composed: {reason}") from error
    except _OF_FILES as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the configuration cannot be composed: {reason}") from error


class _Check:
    def __init__(
        self, overrides: Sequence[str], command: str, config_name: str, config_dir: str | None
    ) -> None:
        self._command, self._config_name = command, config_name
        parser = OverridesParser.create()
        self._parsed = [_parsed(parser, text) for text in overrides]
        self._loader = _loader(config_dir, self._parsed)

    def run(self, multirun: bool) -> None:
        if not multirun:
            _refuse_sweeps(self._parsed)
        chosen = [one for one in self._parsed if self._is_group(one.key_or_group)]
        values = [one for one in self._parsed if one not in chosen]
        for one in chosen:
            self._check_choice(one)
        for choices in product(*(list(self._texts(one)) for one in chosen)):
            config = self._composed(choices)
            for one in values:
                self._check_key(one, config)
            with _readable_errors():
                for one in values:
                    if not one.is_sweep_override():
                        _apply(one, config)
            _check_hydra(config)

    def _all(self, key: str) -> str:
        """Where all keys are listed: in the help of the key's group, if it has one."""
        group = key.partition(".")[0]
        words = f"--help {group}" if group in groups() else "--help"
        return f"`python -m spatialdl.{self._command} {words}` lists all"

    def _is_group(self, name: str) -> bool:
        return bool(self._loader.repository.group_exists(name))

    def _composed(self, choices: Iterable[str]) -> DictConfig:
        with _readable_errors():
            return self._loader.load_configuration(self._config_name, list(choices), RunMode.RUN)

    # --- groups

    def _texts(self, one: Override) -> Iterator[str]:
        """The choice of a group, or all choices of a sweep."""
        if one.is_delete() or not one.is_sweep_override():
            yield str(one.input_line)
            return
        plus = "+" if one.is_add() else ""
        if one.value_type is ValueType.GLOB_CHOICE_SWEEP:
            options = self._loader.get_group_options(one.key_or_group, ObjectType.CONFIG)
            glob = one.value()
            assert isinstance(glob, Glob)
            values = glob.filter(options)
        else:
            values = list(one.sweep_string_iterator())
        yield from (f"{plus}{one.get_key_element()}={value}" for value in values)

    def _check_choice(self, one: Override) -> None:
        group = one.key_or_group
        known = self._loader.get_group_options(group, ObjectType.CONFIG)
        for text in self._texts(one):
            choice = text.partition("=")[2]
            if one.is_delete() or choice in ("null", ""):
                continue
            several = re.fullmatch(r"\[(.*)\]", choice)
            for name in several[1].split(",") if several else [choice]:
                _refuse_removed(f"{group}={name}")
                if not self._loader.repository.config_exists(f"{group}/{name.strip()}"):
                    own = f"; for your own use {group}._target_={name}" * _is_dotted(group, name)
                    raise ValueError(
                        f"{group}={name} is unknown{_perhaps(name, known, f'{group}=')}; choices: "
                        f"{', '.join(known)}{own}"
                    )
        if group.startswith("hydra"):
            return
        used = chosen_by_default(self._command)
        if one.is_add() and group in used:
            raise ValueError(f"+{group}: {group} is already chosen, omit the +")
        if group in groups() and group not in used:
            hint = " (a group of spatialdl.plan)" if group in chosen_by_default("plan") else ""
            raise ValueError(
                f"{group} is not a group of spatialdl.{self._command}{hint}"
                f"{_perhaps(group, [name for name in used if name != group])}; {self._all('')}"
            )

    # --- keys

    def _check_key(self, one: Override, config: DictConfig) -> None:
        key = one.key_or_group
        if _holds(config, key):
            if one.is_add() and not one.is_force_add() and not _is_open(config, key):
                raise ValueError(f"+{key}: {key} already exists, omit the +")
            return
        _refuse_removed(key)
        for path in _paths(key):
            if _is_open(config, path) or path in OWN:
                self._check_taken(one, path, config)
                return
        group = key.partition(".")[0]
        for choice in groups().get(group, []):
            if key in {known.name for known in keys_of(file_of(group, choice))}:
                now = config.hydra.runtime.choices.get(group)
                raise ValueError(
                    f"{key} is a key of {group}={choice}, but {group}={now} is chosen: add "
                    f"{group}={choice}, or remove {key}"
                )
        plus = "+" if one.is_add() else ""
        raise ValueError(
            f"{plus}{key} is unknown{_perhaps(key, self._names(config, key))}; {self._all(key)}"
        )

    def _check_taken(self, one: Override, path: str, config: DictConfig) -> None:
        """Check that a key beside a ``_target_`` is an argument of that target.

        Arguments of the user's own networks are not checked.
        """
        node = OmegaConf.select(config, path, throw_on_missing=False)
        named_here = _is_open(config, path) and not OmegaConf.is_missing(node, "_target_")
        target = self._target(path) or (node._target_ if named_here else None)
        if target is None and path in _AS:
            target = self._target(_AS[path])
        if target is None:
            raise ValueError(
                f"{one.key_or_group} is an argument of {path}._target_, which is not set: add "
                f"{path}._target_=package.Class"
            )
        target = str(target)
        if one.key_or_group == f"{path}._target_":
            return
        if path == "model" and not target.startswith("spatialdl."):
            return
        name = one.key_or_group.removeprefix(f"{path}.").partition(".")[0]
        taken = _arguments(target)
        if taken is None and (one.is_add() or one.is_force_add()):
            return
        known = [*map(str, node if isinstance(node, DictConfig) else ()), *(taken or ())]
        if taken is not None and name not in taken:
            near = _perhaps(name, [word for word in known if word != "_target_"], f"{path}.")
            raise ValueError(f"{path}.{name} is unknown to {target}{near}; {self._all(path)}")
        if not (one.is_add() or one.is_force_add()):
            near = _perhaps(name, list(map(str, node)), f"{path}.")
            raise ValueError(
                f"{path}.{name} is unknown{near}; to pass {target} another argument write "
                f"+{path}.{name}=..."
            )

    def _target(self, path: str) -> str | None:
        """The ``_target_`` set on the command line."""
        targets = [one.value() for one in self._parsed if one.key_or_group == f"{path}._target_"]
        return str(targets[-1]) if targets else None

    def _names(self, config: DictConfig, key: str) -> list[str]:
        """Candidates for a misspelt key."""
        names = list(_all_keys(config))
        return names if "." in key else [*(name for name in names if "." not in name), *names]


def _apply(one: Override, config: DictConfig) -> None:
    """Set, add or remove a value as Hydra does, which would compose everything anew."""
    parent, _, name = one.key_or_group.rpartition(".")
    if one.is_delete():
        with open_dict(config):
            del OmegaConf.select(config, parent)[name]
        return
    adds = one.is_add() or one.is_force_add()
    OmegaConf.update(config, one.key_or_group, one.value(), force_add=adds)


def _check_hydra(config: DictConfig) -> None:
    """Refuse settings by which Hydra writes into a run directory that another run may use."""
    subdir, handlers = config.hydra.output_subdir, config.hydra.job_logging.get("handlers") or {}
    if subdir is not None:
        raise ValueError(
            f"hydra.output_subdir={subdir} is not supported: overrides and configuration of a run "
            "are always written to .hydra in its directory; remove it"
        )
    for name, handler in handlers.items():
        if "filename" in handler:
            raise ValueError(
                f"hydra.job_logging.handlers.{name} writes to a file, but the run directory "
                "already has the log: remove it, or redirect stdout to a file"
            )


def _refuse_removed(name: str) -> None:
    if name in REMOVED:
        raise ValueError(f"{name} is no longer there: use {REMOVED[name]}")


def _refuse_sweeps(overrides: Iterable[Override]) -> None:
    for one in overrides:
        if one.is_sweep_override():
            raise ValueError(
                f"{one.input_line} has several values: add --multirun to run once per value, or "
                f"write a list as {one.key_or_group}=[...]"
            )


def _parsed(parser: OverridesParser, text: str) -> Override:
    if text.startswith("="):
        raise ValueError(f"{text} has no key: write key=value")
    if "=" not in text and not text.startswith("~"):
        raise ValueError(f"{text} has no value: write {text}=value")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{text} cannot be parsed as key=value ({reason}): quote values with spaces, commas or "
            "brackets, key='\"...\"'"
        ) from error


def _loader(config_dir: str | None, overrides: Iterable[Override]) -> ConfigLoaderImpl:
    Plugins.instance()
    path = create_config_search_path("pkg://spatialdl.conf")
    if config_dir is not None:
        folder = os.path.abspath(config_dir)
        if not Path(folder).is_dir():
            raise ValueError(f"--config-dir {config_dir} is not a directory")
        path.prepend("command-line", f"file://{folder}")
    for one in overrides:
        folders = one.value() if one.key_or_group == "hydra.searchpath" else None
        if isinstance(folders, list):
            for folder in folders:
                path.prepend("command-line", str(folder))
    return ConfigLoaderImpl(path)


def _paths(key: str) -> list[str]:
    """All parents of a key, outermost first."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _node(config: DictConfig, key: str) -> object:
    node: object = config
    for part in key.split("."):
        if isinstance(node, DictConfig) and part in node.keys():  # noqa: SIM118 (missing values)
            node = node._get_node(part)
        elif isinstance(node, ListConfig) and part.isdigit() and int(part) < len(node):
            node = node._get_node(int(part))
        else:
            return None
    return node


def _holds(config: DictConfig, key: str) -> bool:
    return _node(config, key) is not None


def _is_open(config: DictConfig, key: str) -> bool:
    """Whether the key has a ``_target_``, which may take more arguments than the file lists."""
    node = _node(config, key)
    return isinstance(node, DictConfig) and "_target_" in node.keys()  # noqa: SIM118 (missing too)


def _arguments(target: str) -> list[str] | None:
    """Parameters of a class or function; None with ``**kwargs``, or if it cannot be imported."""
    try:
        parameters = inspect.signature(named(target)).parameters.values()
    except Exception:
        return None  # raised when it is instantiated
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters]


def _all_keys(node: object, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, DictConfig):
        return
    for name in map(str, node):
        if prefix == "" and name == "hydra":
            yield from ("hydra.run.dir", "hydra.sweep.dir")
            continue
        yield f"{prefix}{name}"
        yield from _all_keys(node._get_node(name), f"{prefix}{name}.")


def _is_dotted(group: str, name: str) -> bool:
    """Whether a class name stands where a choice of the group is expected."""
    return group in ("model", "optimizer", "scheduler") and "." in name


def _perhaps(word: str, known: Sequence[str], prefix: str = "") -> str:
    """Suggestion: the nearest of the known words, or one with a similar last part."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    meant = ELSEWHERE.get(word.rpartition(".")[2], "").removeprefix(prefix)
    if meant in known:
        near = [meant]
    if not near:
        last = {name.rpartition(".")[2]: name for name in known}
        near = [last[one] for one in get_close_matches(word.rpartition(".")[2], last, n=1)]
    return f"; nearest: {prefix}{near[0]}" if near else ""
