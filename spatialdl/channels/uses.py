"""Determines how weights are divided over the tensor axis, from their use in forward.

A forward runs without data. The first layer that uses a weight chooses the division that sends
less. A parameter that no layer of `channels.layers` uses is divided on trial. It stays divided if
no operation needs all channels of a tensor computed from it alone. Otherwise another dim is tried,
and finally the parameter is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Use, install_weights, places
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import dry_mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.parallel.partition import FORMS
from spatialdl.random import keyed
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_map_only

ROUNDS = 8
"""Maximum number of forwards, repeated while operations after the layers request partitions."""

Plan = Mapping[str, str]
"""One of `FORMS` by names of modules with ``*`` and ``?``, which include submodules; the last match
applies."""


def check_plan(network: nn.Module, plan: Plan) -> None:
    """Check the values and the module names of a plan.

    Raises:
        ValueError: a value or module name is unknown.
    """
    paths = [path for path, _, _, _ in places(network)]
    for pattern, form in plan.items():
        if form not in FORMS:
            raise ValueError(
                f"tensor_plan of '{pattern}' is {form}: must be one of {', '.join(FORMS)}"
            )
        if not any(_matches(path, pattern) for path in paths):
            raise ValueError(
                f"tensor_plan names '{pattern}', which matches no module of "
                f"{type(network).__name__} with weights"
            )


def _matches(path: str, pattern: str) -> bool:
    """Whether a parameter is in a module whose name matches."""
    parents = path.split(".")[:-1]
    return any(fnmatch(".".join(parents[: n + 1]), pattern) for n in range(len(parents)))


def uses_of(
    network: nn.Module,
    comm: Communicator,
    run: Callable[[nn.Module], object],
    plan: Plan = MappingProxyType({}),
) -> dict[str, Use]:
    """The uses of all divided weights in a forward, by all names of the weights.

    Args:
        network: not modified.
        comm: the tensor axis.
        run: calls the forward of a copy of the network on the meta device.
        plan: fixes the division of some parameters.

    Raises:
        UnsupportedSpatialOp: the forward cannot run without data.
        ValueError: a layer cannot be divided as planned.
    """
    shadow, dry = meta_copy(network), Dry(comm.rank, comm.size)
    hooked = {path for path, _, _, held in places(network) if _has_hooks(held)}
    of_state: dict[int, Use] = {}
    uses: dict[str, Use] = {}
    for path, _, _, held in places(shadow):
        if held.dim() > 0 and held.is_floating_point():
            uses[path] = use = of_state.setdefault(id(held), Use())
            if isinstance(held, nn.Parameter):
                forms = [form for pattern, form in plan.items() if _matches(path, pattern)]
                use.form = forms[-1] if forms else use.form
                use.form = "replicate" if path in hooked else use.form
                use.is_known = use.form == "replicate"
    install_weights(shadow, uses, dry)
    for module in shadow.modules():
        plain = {name: one for name, one in vars(module).items() if type(one) is Tensor}
        vars(module).update({name: one.to("meta") for name, one in plain.items()})
    for left in reversed(range(ROUNDS)):
        try:
            with torch.no_grad(), on_meta(), keyed(0, 0), _wholes_for_functions():
                run(shadow)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedSpatialOp(
                f"the forward of {type(network).__name__} cannot run without data, so its weights "
                f"cannot be divided: {error}; use tensor=1"
            ) from error
        if not left or not _needs_another_forward(of_state.values()):
            break
    for use in of_state.values():
        use.on_trial = False
    return {path: use for path, use in uses.items() if use.at is not None}


@contextmanager
def _wholes_for_functions() -> Iterator[None]:
    """Pass whole weights to each `torch.autograd.Function`, which cannot take divided ones."""
    real = Function.__dict__["apply"]

    def whole(x: Any) -> Any:
        is_of_weights = isinstance(x, ChannelTensor) and (x.is_open or x.trial is not None)
        return whole_of(x) if is_of_weights else x

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return real.__get__(None, cls)(*map(whole, args), **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = real  # type: ignore[method-assign]


def _has_hooks(held: Tensor) -> bool:
    """Whether user hooks receive the gradient; they may need all of it."""
    return bool(held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None))


def _needs_another_forward(uses: Collection[Use]) -> bool:
    """Whether another forward is needed; then all uses without a request are reset.

    Failed trials count only after a forward without new requests.
    """
    has_requests = any(use.has_new_request for use in uses)
    failed = [use for use in uses if use.refused and not has_requests]
    for use in failed:
        use.tries, use.requested = use.tries + 1, None
    for use in uses:
        use.refused = False
        if has_requests or failed:
            use.renew()
    return has_requests or bool(failed)


def without_data(arguments: Any) -> Any:
    """Arguments of a forward on the meta device."""
    return tree_map_only(Tensor, _without_data, arguments)


def _without_data(x: Tensor) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return torch.empty_like(x, device="meta")
    tile = torch.empty_like(x.to_local().detach(), device="meta")
    mesh = dry_mesh(x.mesh.grid, x.mesh.part)
    return SpatialTensor(tile, x.spatial_layout, mesh, x.spatial_dims)
