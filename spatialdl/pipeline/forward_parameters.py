"""Detects forwards that change a parameter, which replicas would repeat.

Each replica would change it once per slice, and sharded state may lose the write. The first step
compares values, and looks for writes by ``parameter.data``, which bypass the version counter. Later
steps compare versions and addresses only, without synchronization.
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
from spatialdl.torch_internals import DisableTorchFunction


class _Seen(NamedTuple):
    """A parameter before a forward; with a digest of its values in the first step."""

    tensor: Tensor
    state: tuple[int, ...]
    values: Tensor | None


class ForwardParameters:
    """Finds the parameters of a stage that its forwards change.

    Args:
        stage: the module that has the parameters.
        units: modules in it whose weights are gathered for their forward by hooks, if any.

    Attributes:
        written: name of a parameter that a forward has changed; empty if none.
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
        """Compare a unit's parameters between the hooks that gather (first) and reshard (last)."""
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
        """Context of the forward of a slice of the batch, then of its backward.

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
        for parameter, alias, version in aliases.aliases:
            if alias._version != version and id(parameter) in self._names:
                self.written = self.written or self._names[id(parameter)]
        if self.written and not self._is_first:
            raise _refusal(self.written)

    @torch.no_grad()
    def _look(self, module: nn.Module, prefix: str = "") -> dict[str, _Seen]:
        parameters = {}
        with DisableTorchFunction():
            for name, parameter in module.named_parameters(prefix.removesuffix(".")):
                local = shard_of(parameter)
                state = parameter._version, local._version, local.data_ptr()
                parameters[name] = _Seen(
                    parameter, state, digest(parameter) if self._is_first else None
                )
                self._names[id(parameter)] = name
        return parameters

    def _compare(self, before: dict[str, _Seen], after: dict[str, _Seen]) -> None:
        with DisableTorchFunction():
            for name, old in before.items():
                new = after.get(name)
                if new is not None and type(new.tensor) is not type(old.tensor):
                    continue  # gathered or resharded in between
                if new is None or new.tensor is not old.tensor or new.state != old.state:
                    self.written = self.written or name
                elif old.values is not None and new.values is not None:
                    self._flags.setdefault(name, []).append(old.values != new.values)

    def fold(self, slices: int) -> None:
        """End the step; after the first one, compare values."""
        self._forward.clear()
        self._names.clear()
        if self._flags and not self.written:
            changed = torch.stack([torch.stack(flags).any() for flags in self._flags.values()])
            pairs = zip(self._flags, changed.tolist(), strict=True)
            self.written = next((name for name, differs in pairs if differs), "")
        self._is_first, self._flags = False, {}


def check_unwritten(comm: Communicator, watched: Sequence[ForwardParameters]) -> None:
    """Check the first step of all stages; collective over the pipeline's ranks.

    Raises:
        UnsupportedSpatialOp: on all ranks, if a forward on any rank has changed a parameter.
    """
    own = next((stage.written for stage in watched if stage.written), "")
    written = next((name for name in comm.allgather(own) if name), "")
    if written:
        raise _refusal(written)


class _Aliases(TorchFunctionMode):
    """Records each ``parameter.data``, which has a separate version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases: list[tuple[Tensor, Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_data = func == Tensor.data.__get__  # type: ignore[attr-defined]
        if is_data and isinstance(args[0], nn.Parameter):
            self.aliases.append((args[0], result, result._version))
        return result


def _refusal(name: str) -> UnsupportedSpatialOp:
    return UnsupportedSpatialOp(
        f"the forward changes the parameter '{name}', which replicas, copies and ranks that divide "
        "a batch would each do once per slice, unlike a single process: do it after "
        "the optimizer's step, or in a parametrization (torch.nn.utils.parametrize), or take "
        "parallel=sp, lp or pp"
    )
