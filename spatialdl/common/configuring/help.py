"""Text of ``--help``: groups, keys, examples. Does not import PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap

from spatialdl.common.configuring.keys import (
    CONF,
    Key,
    about,
    chosen_by_default,
    file_of,
    groups,
    keys_of,
)

WIDTH = 100
_NAME, _DEFAULT = 28, 18  # columns

_WHAT = {
    "train": "Train a network on images split over ranks. Launches the ranks.",
    "plan": "List the layouts that fit a number of ranks, fastest first. Trains nothing.",
    "predict": "Predict slides, volumes or shards with a trained network. Launches the ranks.",
    "evaluate": "Compare predictions with labels: metrics, intervals, pictures, a report.",
}
_EXAMPLES = {
    "train": (
        ("experiment=quickstart", "less than a minute on two cores"),
        ("parallel=sp+pp data.image_size=[512,512]", "random images, on three ranks"),
        ("model=resnet50 data=shards data.path=tiles parallel=dp", "your own data set"),
        (
            "parallel=sp parallel.grid=[16,16] debug=fakecomm",
            "dry run of 256 ranks; trains nothing",
        ),
        ("--multirun optimizer.lr=0.1,0.01", "one run per value"),
        ("--multirun launcher=slurm seed=0,1,2", "each run as a Slurm job"),
    ),
    "plan": (
        ("model=resnet50 world=16 cluster=infiniband", "layouts for 16 devices"),
        ("--calibrate world=2", "measure this machine first"),
    ),
    "predict": (
        ("ckpt_path=RUN slides='/data/*.svs'", "tiled as the training set"),
        ("ckpt_path=RUN slides=a.svs parallel=sp parallel.grid=[2,2]", "over four ranks"),
        ("ckpt_path=RUN volumes=scans parallel=sp parallel.grid=[2,1,1]", "NIfTI, over two ranks"),
        ("ckpt_path=RUN shards=tiles split=test maps=false", "tables only"),
    ),
    "evaluate": (
        ("ckpt_path=RUN shards=tiles split=test", "a split of a data set with labels"),
        ("ckpt_path=RUN slides='/data/*.svs' labels=labels.csv", "slides with labels in a table"),
        ("predictions=predicted labels=labels.csv subgroups=[scanner]", "existing predictions"),
    ),
}
_EXTENDED = {"plan": "train", "evaluate": "predict"}  # also accept the keys of this command
_FLAGS = (
    ("--multirun, -m", "run once for each of several comma-separated values"),
    ("--config-dir DIR", "a folder with your own groups, such as DIR/model/mine.yaml"),
    ("--cfg job", "print the configuration and exit; --resolve also resolves references"),
)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return "--help" in arguments or "-h" in arguments


def print_help(command: str, arguments: Sequence[str] = ()) -> None:
    """Print the help of a command of spatialdl, or of the groups that its arguments name."""
    sys.stdout.write("\n".join(help_lines(command, arguments)) + "\n")


def help_lines(command: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """The lines of the help, at most `WIDTH` long.

    Args:
        command: name of the command.
        arguments: of the command line; ``GROUP`` and ``GROUP=CHOICE`` list all keys of these.
    """
    yield f"python -m spatialdl.{command} [key=value ...]"
    chosen = chosen_by_default(command)
    named = [word.partition("=") for word in arguments]
    asked = [(group, choice) for group, _, choice in named if group in chosen]
    for group, choice in asked:
        names = [choice] if choice in groups()[group] else groups()[group]
        yield from _group_keys(group, sorted(names, key=lambda name: name != chosen[group]))
    if not asked:
        yield from _general(command, chosen)


def _general(command: str, chosen: dict[str, str]) -> Iterator[str]:
    yield from ("", _WHAT[command], "")
    for arguments, what in _EXAMPLES[command]:
        yield f"  python -m spatialdl.{command} {arguments}"
        yield f"      {what}"
    yield from _groups(chosen)
    yield from _titled("Keys", [key for key in _own_keys(command) if not key.is_rare])
    for group, choice in chosen.items():
        keys = [] if choice == "null" else _shown(group, choice)
        yield from _titled(f"{group}={choice}", [key for key in keys if not key.is_rare])
    yield ""
    yield from wrap(
        "These are the keys of the default choices that are often set. "
        f"`python -m spatialdl.{command} --help GROUP` lists all keys of a group, `--help "
        "GROUP=CHOICE` those of one choice; --cfg job prints all keys of the configuration.",
        WIDTH,
    )
    yield from _titled("Flags", [Key(name, "", text) for name, text in _FLAGS])
    if command in ("predict", "evaluate"):
        return
    yield ""
    yield from wrap(
        "Arguments of a network, loss or optimizer are keys too: model.KEY=VALUE for your own "
        "network (model._target_=package.Class), task.loss.KEY=VALUE for your own loss "
        "(task.loss._target_=package.Loss), +optimizer.KEY=VALUE for an optimizer of PyTorch.",
        WIDTH,
    )


def _groups(chosen: dict[str, str]) -> Iterator[str]:
    yield ""
    yield "Groups: GROUP=CHOICE selects a file of keys; * marks the default"
    for group, default in chosen.items():
        names = [f"*{name}" if name == default else name for name in groups()[group]]
        yield from wrap(
            ", ".join(names), WIDTH, initial_indent=f"  {group:14}", subsequent_indent=" " * 16
        )
        for choice in groups()[group]:
            text = about(file_of(group, choice))
            if text:
                yield from wrap(
                    text,
                    WIDTH,
                    initial_indent=f"{'':18}{choice + ':':17} ",
                    subsequent_indent=" " * 36,
                )


def _own_keys(command: str) -> list[Key]:
    """Keys that belong to no group."""
    keys = [key for key in keys_of(CONF / f"{command}.yaml") if key.comment]
    if command in _EXTENDED:
        inherited = _own_keys(_EXTENDED[command])
        keys += [key for key in inherited if key.name not in {own.name for own in keys}]
    return keys


def _shown(group: str, choice: str) -> list[Key]:
    """Keys of a choice that a user may set."""
    package = group.replace("/", ".")
    internal = (f"{package}.name", f"{package}._partial_")
    return [
        key
        for key in keys_of(file_of(group, choice))
        if key.comment and key.name.startswith(f"{package}.") and key.name not in internal
    ]


def _group_keys(group: str, choices: Sequence[str]) -> Iterator[str]:
    """All keys of the first choice, and new or different keys of the others."""
    known: dict[str, str] = {}
    for number, choice in enumerate(choices):
        keys = _shown(group, choice)
        if number:
            target = f"{group.replace('/', '.')}._target_"
            keys = [k for k in keys if known.get(k.name) != k.default and k.name != target]
        yield from _titled(f"{group}={choice}", keys)
        known |= {key.name: key.default for key in keys_of(file_of(group, choice))}


def _titled(title: str, keys: Sequence[Key]) -> Iterator[str]:
    if not keys:
        return
    yield ""
    yield title
    for key in keys:
        yield from _row(key)


def _row(key: Key) -> Iterator[str]:
    """A key, its default and its comment, wrapped in its column."""
    left = f"  {key.name:{_NAME}} {key.default:{_DEFAULT}} "
    room = 2 + _NAME + 1 + _DEFAULT + 1
    if len(left) > room:  # a long default has a line of its own
        yield left.rstrip()
        left = " " * room
    lines = wrap(key.comment, WIDTH - room) or [""]
    yield (left + lines[0]).rstrip()
    yield from (" " * room + line for line in lines[1:])
