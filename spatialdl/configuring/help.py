"""``--help``: groups, keys with their defaults and comments, examples. No PyTorch, no Hydra."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap

from spatialdl.configuring.keys import CONF, Key, about, chosen_by_default, file_of, groups, keys_of

WIDTH = 100
_NAME, _DEFAULT = 28, 18  # columns

_WHAT = {
    "train": "Train a network on images that are split over ranks. Starts the ranks itself.",
    "plan": "List the layouts that fit a number of ranks, the fastest first. Runs nothing.",
    "predict": "Predict slides, volumes or shards by a trained network. Starts the ranks itself.",
    "evaluate": "Compare predictions with labels: metrics, intervals, pictures, a report.",
}
_EXAMPLES = {
    "train": (
        ("experiment=quickstart", "less than a minute on two cores"),
        ("parallel=sp+pp data.image_size=[512,512]", "random images, on three ranks"),
        ("model=resnet50 data=shards data.path=tiles parallel=dp", "a data set of yours"),
        (
            "parallel=sp parallel.grid=[16,16] debug=fakecomm",
            "what 256 ranks would do; runs nothing",
        ),
        ("--multirun optimizer.lr=0.1,0.01", "a run for each value"),
        ("--multirun launcher=slurm seed=0,1,2", "each as a job of Slurm"),
    ),
    "plan": (
        ("model=resnet50 world=16 cluster=infiniband", "the layouts for 16 devices"),
        ("--calibrate world=2", "measure this machine first"),
    ),
    "predict": (
        ("ckpt_path=RUN slides='/data/*.svs'", "cut as the training set was"),
        ("ckpt_path=RUN slides=a.svs parallel=sp parallel.grid=[2,2]", "over four ranks"),
        ("ckpt_path=RUN volumes=scans parallel=sp parallel.grid=[2,1,1]", "NIfTI, over two ranks"),
        ("ckpt_path=RUN shards=tiles split=test maps=false", "tables only"),
    ),
    "evaluate": (
        ("ckpt_path=RUN shards=tiles split=test", "a split of a data set with labels"),
        ("ckpt_path=RUN slides='/data/*.svs' labels=labels.csv", "slides with labels in a table"),
        ("predictions=predicted labels=labels.csv subgroups=[scanner]", "predicts nothing again"),
    ),
}
_EXTENDED = {"plan": "train", "evaluate": "predict"}  # commands that take the keys of others
_FLAGS = (
    ("--multirun, -m", "run once for each of the values that are separated by commas"),
    ("--config-dir DIR", "a folder with groups of your own, such as DIR/model/mine.yaml"),
    ("--cfg job", "print the configuration and run nothing; with --resolve, its references, too"),
)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return "--help" in arguments or "-h" in arguments


def print_help(command: str) -> None:
    """All that a command of spatialdl takes."""
    sys.stdout.write("\n".join(help_lines(command)) + "\n")


def help_lines(command: str) -> Iterator[str]:
    """The lines of the help, at most `WIDTH` long."""
    yield f"python -m spatialdl.{command} [key=value ...]"
    yield ""
    yield _WHAT[command]
    yield ""
    for arguments, what in _EXAMPLES[command]:
        yield f"  python -m spatialdl.{command} {arguments}"
        yield f"      {what}"
    chosen = chosen_by_default(command)
    yield from _groups(chosen)
    yield from _titled("Keys", _own_keys(command))
    yield ""
    yield from wrap(
        "A choice of a group lists the keys that no choice above it has, or that it sets "
        "otherwise; --cfg job prints all keys of the choices of a command.",
        WIDTH,
    )
    for group, choice in chosen.items():
        yield from _group_keys(group, choice)
    yield from _titled("Flags", [Key(name, "", text) for name, text in _FLAGS])
    if command in ("predict", "evaluate"):
        return
    yield ""
    yield from wrap(
        "Any argument of a network or an optimizer is a key, too: model.KEY=VALUE for a network "
        "of yours (model._target_=package.Class), task.loss.KEY=VALUE for a loss of yours "
        "(task.loss._target_=package.Loss), +optimizer.KEY=VALUE for PyTorch's.",
        WIDTH,
    )


def _groups(chosen: dict[str, str]) -> Iterator[str]:
    yield ""
    yield "Groups: GROUP=CHOICE takes a file with keys; * is taken if nothing is said"
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
    """Those that belong to no group."""
    found = [key for key in keys_of(CONF / f"{command}.yaml") if key.comment]
    if command in _EXTENDED:
        before = _own_keys(_EXTENDED[command])
        found += [key for key in before if key.name not in {one.name for one in found}]
    return found


def _group_keys(group: str, default: str) -> Iterator[str]:
    """The keys of the default choice, and what other choices have beside or instead of them."""
    shown: dict[str, str] = {}
    package = group.replace("/", ".")
    others = [name for name in groups()[group] if name != default]
    for choice in others if default == "null" else [default, *others]:
        found = []
        for key in keys_of(file_of(group, choice)):
            is_new = key.name not in shown
            # layouts set the keys of one rank otherwise, which is what their names say
            differs = group != "parallel" and shown.get(key.name) != key.default
            is_own = key.name.startswith(f"{package}.") and not key.name.endswith("._partial_")
            if is_own and key.comment and (is_new or differs):
                found.append(key)
            shown[key.name] = key.default
        if choice != default:
            found = [
                key for key in found if key.name not in (f"{package}._target_", f"{package}.name")
            ]
        yield from _titled(f"{group}={choice}", found)


def _titled(title: str, keys: Sequence[Key]) -> Iterator[str]:
    if not keys:
        return
    yield ""
    yield title
    for key in keys:
        yield from _row(key)


def _row(key: Key) -> Iterator[str]:
    """A key, its default and its comment, which goes on below itself."""
    left = f"  {key.name:{_NAME}} {key.default:{_DEFAULT}} "
    room = 2 + _NAME + 1 + _DEFAULT + 1
    if len(left) > room:  # a long default has a line of its own
        yield left.rstrip()
        left = " " * room
    lines = wrap(key.comment, WIDTH - room) or [""]
    yield (left + lines[0]).rstrip()
    yield from (" " * room + line for line in lines[1:])
