"""Spectral norm's vectors over replicas, with as many power iterations as in a single process.

Each forward in training refines the vectors, from the weights alone, and uses them. A single
process that accumulates over all slices of a batch refines them once per slice. So each slice here
gets the vectors that it would have there, and the step ends with the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.comm.replay import replaying
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.torch_internals import ParametrizedSpectralNorm


class SpectralNorms:
    """Spectral norms of a stage, by either implementation in PyTorch.

    Args:
        stage: its layers get hooks.
        comm: the ranks that have this stage.
    """

    def __init__(self, stage: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._norms: list[_Norm] = []
        for path, module in stage.named_modules():
            if isinstance(module, ParametrizedSpectralNorm) and hasattr(module, "_u"):
                self._norms.append(_Norm(path, module, ("_u", "_v"), _refine))
                module.register_forward_pre_hook(self._norms[-1].before)
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, SpectralNorm):
                    names = f"{hook.name}_u", f"{hook.name}_v"
                    self._norms.append(_Norm(path, module, names, partial(_refine_by, hook)))
                    _register_before(key, module, self._norms[-1].before)
        self._order: Sequence[int] = ()
        self._counts = True

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that have the vectors as buffers."""
        return [norm.module for norm in self._norms]

    def begin(self, order: Sequence[int]) -> None:
        """Begin a step.

        Args:
            order: the slices with samples, in the order of a single process.
        """
        self._order = order
        for norm in self._norms:
            norm.begin(len(order))

    @contextmanager
    def slice(self, number: int, counts: bool) -> Iterator[None]:
        """Context of the calls for one slice of the batch; see `pipeline.statistics`."""
        for norm in self._norms:
            norm.index, norm.counts = self._order.index(number), counts
        try:
            yield
        finally:
            for norm in self._norms:
                norm.index = None

    @torch.no_grad()
    def fold(self, slices: int) -> None:
        """Set the vectors of the last slice; collective.

        Raises:
            UnsupportedSpatialOp: if a norm was not computed once for each slice.
        """
        if not self._norms:
            return
        own = torch.tensor([[norm.calls, norm.has_states] for norm in self._norms])
        table = gather_over_ranks(self._comm, own, "calls of spectral norms")
        calls, has_states = table[..., 0].sum(0).tolist(), table[..., 1]
        for row, (norm, count) in enumerate(zip(self._norms, calls, strict=True)):
            if count not in (0, len(self._order)):
                raise UnsupportedSpatialOp(
                    f"the spectral norm of '{norm.path}' is computed {count} times in the forwards "
                    f"of {len(self._order)} slices of a batch, but replicas can only reproduce "
                    "one computation each: use its weight once in a forward, not under a "
                    "checkpoint, or take a layout without replicas (parallel=sp, lp or pp)"
                )
            if count:
                norm.finish()
            if count and not all(has_states[:, row]):
                self._copy(norm, int(has_states[:, row].argmax()))

    def _copy(self, norm: _Norm, root: int) -> None:
        """Copy the vectors from a rank that had samples to those without."""
        for vector in norm.vectors:
            own = vector if self._comm.rank == root else torch.zeros_like(vector)
            vector.copy_(sum_over_ranks(self._comm, own, "vectors of spectral norms"))


class _Norm:
    """A spectral norm with its vectors before each slice of a step, and after the last.

    Args:
        names: of its two vectors.
        refine: runs a power iteration as in forward; takes the arguments of a forward pre-hook.
    """

    def __init__(
        self, path: str, module: nn.Module, names: tuple[str, str], refine: Callable[..., None]
    ) -> None:
        self.path, self.module = path, module
        self._names, self._refine = names, refine
        self.index: int | None = None
        self.counts = True
        self.begin(0)

    def begin(self, slices: int) -> None:
        self._slices, self.calls = slices, 0
        self._states: list[list[Tensor]] = []

    @property
    def vectors(self) -> list[Tensor]:
        return [getattr(self.module, name) for name in self._names]

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    @torch.no_grad()
    def before(self, module: nn.Module, args: Any) -> None:
        """Set the vectors before forward refines them for a slice."""
        if self.index is None or not module.training:
            return
        if not self._states:  # all slices now: sharded weights are whole, and may not be later
            self._states.append([vector.clone() for vector in self.vectors])
            for _ in range(self._slices):
                self._refine(module, args)
                self._states.append([vector.clone() for vector in self.vectors])
        self._take(self.index)
        if self.counts and not replaying():
            self.calls += 1

    def finish(self) -> None:
        if self._states:
            self._take(-1)

    def _take(self, state: int) -> None:
        for vector, value in zip(self.vectors, self._states[state], strict=True):
            vector.copy_(value)


def _refine(norm: ParametrizedSpectralNorm, args: Any) -> None:
    norm._power_method(norm._reshape_weight_to_matrix(args[0]), norm.n_power_iterations)


def _refine_by(norm: SpectralNorm, module: nn.Module, args: Any) -> None:
    norm.compute_weight(module, do_power_iteration=True)


def _register_before(key: int, module: nn.Module, hook: Callable[..., None]) -> None:
    """Add a hook before another one; both stay after those that gather weights."""
    hooks = module._forward_pre_hooks
    following = list(hooks)[list(hooks).index(key) :]
    module.register_forward_pre_hook(hook)
    for other in following:
        hooks.move_to_end(other)  # type: ignore[attr-defined]
