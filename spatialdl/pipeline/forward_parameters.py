"""Forwards that change a parameter, which several replicas cannot do as one process does.

Each replica would change it as often as it has samples, and sharded state may lose what was
written. The first step compares values, and looks for writes by ``parameter.data``, of which no
version is counted; later steps compare versions and addresses only, which no device waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.digest import digest
from spatialdl.comm.gradients import shard_of
from spatialdl.errors import UnsupportedSpatialOp


class _Seen(NamedTuple):
    """A parameter before a forward; its values as a number, in the first step only."""

    tensor: Tensor
    state: tuple[int, ...]
    values: Tensor | None


class ForwardParameters:
    """Finds the parameters of a stage into which its forwards write.

    Args:
        stage: its parameters are watched.
        units: modules in it whose weights are gathered for their forward, by hooks; or none.

    Attributes:
        written: the name of a parameter that a forward has changed; empty if none.
    """

    def __init__(self, stage: nn.Module, units: Sequence[nn.Module] = ()) -> None:
        self._stage = stage
        self._is_first, self._in_forward = True, False  # the first step
        self._forward: set[int] = set()
        self._names: dict[int, str] = {}
        self.written = ""
        self._flags: dict[str, list[Tensor]] = {}
        paths = {module: path for path, module in stage.named_modules()}
        for unit in units:
            self._register(unit, f"{paths[unit]}." if paths[unit] else "")

    def _register(self, unit: nn.Module, prefix: str) -> None:
        """Look at a unit between the hooks that gather, the first, and give back, the last."""
        seen: dict[str, _Seen] = {}

        def before(module: nn.Module, args: Any) -> None:
            seen.clear()
            if self._in_forward:
                seen.update(self._look(module, prefix))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._compare(seen, self._look(module, prefix) if seen else {})
            seen.clear()

        gathers, gives_back = next(iter(unit._forward_pre_hooks)), [*unit._forward_hooks][-1]
        unit.register_forward_pre_hook(before, prepend=True)
        unit._forward_pre_hooks.move_to_end(gathers, last=False)  # type: ignore[attr-defined]
        unit.register_forward_hook(after)
        unit._forward_hooks.move_to_end(gives_back)  # type: ignore[attr-defined]

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Around the forward of a slice of the batch, then around its backward.

        Raises:
            UnsupportedSpatialOp: if the forward changes a parameter, but did not in the first step.
        """
        if number in self._forward:
            yield
            return
        self._forward.add(number)
        seen, aliases = self._look(self._stage), _Aliases()
        self._in_forward = True
        try:
            with aliases if self._is_first else nullcontext():
                yield
        finally:
            self._in_forward = False
        self._compare(seen, self._look(self._stage))
        for parameter, alias, version in aliases.found:
            if alias._version != version and id(parameter) in self._names:
                self.written = self.written or self._names[id(parameter)]
        if self.written and not self._is_first:
            raise _refusal(self.written)

    @torch.no_grad()
    def _look(self, module: nn.Module, prefix: str = "") -> dict[str, _Seen]:
        found = {}
        with torch._C.DisableTorchFunction():
            for name, one in module.named_parameters(prefix.removesuffix(".")):
                local = shard_of(one)
                state = one._version, local._version, local.data_ptr()
                found[name] = _Seen(one, state, digest(one) if self._is_first else None)
                self._names[id(one)] = name
        return found

    def _compare(self, before: dict[str, _Seen], after: dict[str, _Seen]) -> None:
        with torch._C.DisableTorchFunction():
            for name, old in before.items():
                new = after.get(name)
                if new is not None and type(new.tensor) is not type(old.tensor):
                    continue  # gathered or given back meanwhile
                if new is None or new.tensor is not old.tensor or new.state != old.state:
                    self.written = self.written or name
                elif old.values is not None and new.values is not None:
                    self._flags.setdefault(name, []).append(old.values != new.values)

    def fold(self, slices: int) -> None:
        """A step ends; after the first one, compare values."""
        self._forward.clear()
        self._names.clear()
        if self._flags and not self.written:
            changed = torch.stack([torch.stack(flags).any() for flags in self._flags.values()])
            pairs = zip(self._flags, changed.tolist(), strict=True)
            self.written = next((name for name, differs in pairs if differs), "")
        self._is_first, self._flags = False, {}


def check_unwritten(comm: Communicator, watched: Sequence[ForwardParameters]) -> None:
    """At the end of the first step; all ranks of a pipeline must call it.

    Raises:
        UnsupportedSpatialOp: on all ranks, if a forward on one of them has changed a parameter.
    """
    own = next((one.written for one in watched if one.written), "")
    written = next((name for name in comm.allgather(own) if name), "")
    if written:
        raise _refusal(written)


class _Aliases(TorchFunctionMode):
    """Notes each ``parameter.data``, which counts versions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_data = func == Tensor.data.__get__  # type: ignore[attr-defined]
        if is_data and isinstance(args[0], nn.Parameter):
            self.found.append((args[0], result, result._version))
        return result


def _refusal(name: str) -> UnsupportedSpatialOp:
    return UnsupportedSpatialOp(
        f"the forward changes the parameter '{name}', which replicas, copies and ranks that divide "
        "a batch would each do as often as they have samples, other than one process: do it after "
        "the optimizer's step, or in a parametrization (torch.nn.utils.parametrize), or take "
        "parallel=sp, lp or pp"
    )
