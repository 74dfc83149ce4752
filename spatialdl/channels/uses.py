"""How a network uses its weights, and so how each is divided over the tensor axis.

Its forward runs without data, and every layer that meets a weight first says which way moves fewer
numbers. A parameter that no layer of `channels.layers` takes is divided on trial: it stays so if
nothing needs all channels of what is made of it alone, and else is tried along another dim, and
stays whole in the end.
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
from torch.utils._pytree import tree_map_only

from spatialdl.channels.tensor import ChannelTensor, whole_of
from spatialdl.channels.weights import Use, places, shown
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import dry_mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.parallel.partition import FORMS
from spatialdl.random import keyed
from spatialdl.spatial.shadow import meta_copy
from spatialdl.spatial.tensor import SpatialTensor

ROUNDS = 8
"""How often a network is looked at, at most, for wishes of operations behind its layers."""

Plan = Mapping[str, str]
"""By names of modules with ``*`` and ``?``, which stand for all inside, one of `FORMS`; later ones
count."""


def check_plan(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan with forms that there are not, or for modules that a network has not.

    Raises:
        ValueError: naming them.
    """
    paths = [path for path, _, _, _ in places(network)]
    for pattern, form in plan.items():
        if form not in FORMS:
            raise ValueError(
                f"tensor_plan of '{pattern}' is {form}: take one of {', '.join(FORMS)}"
            )
        if not any(_matches(path, pattern) for path in paths):
            raise ValueError(
                f"tensor_plan names '{pattern}', but no module of {type(network).__name__} with "
                "weights has such a name"
            )


def _matches(path: str, pattern: str) -> bool:
    """Whether a parameter lies in a module of such a name."""
    parents = path.split(".")[:-1]
    return any(fnmatch(".".join(parents[: n + 1]), pattern) for n in range(len(parents)))


def uses_of(
    network: nn.Module,
    comm: Communicator,
    run: Callable[[nn.Module], object],
    plan: Plan = MappingProxyType({}),
) -> dict[str, Use]:
    """How a forward uses the weights that can be divided, by all their names.

    Args:
        network: stays as it is.
        comm: the tensor axis.
        run: the forward of a copy of the network without data, with arguments like that.
        plan: of parameters for which it is not to be found out.

    Raises:
        UnsupportedSpatialOp: if it cannot run so.
        ValueError: if a layer cannot be divided as the plan has it.
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
    shown(shadow, uses, dry)
    for module in shadow.modules():
        plain = {name: one for name, one in vars(module).items() if type(one) is Tensor}
        vars(module).update({name: one.to("meta") for name, one in plain.items()})
    for left in reversed(range(ROUNDS)):
        try:
            with torch.no_grad(), torch.device("meta"), keyed(0, 0), _wholes_for_functions():
                run(shadow)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedSpatialOp(
                f"how {type(network).__name__} uses its weights cannot be found out without data, "
                f"so they cannot be divided: {error}; take tensor=1"
            ) from error
        if not left or not _granted(of_state.values()):
            break
    for use in of_state.values():
        use.on_trial = False
    return {path: use for path, use in uses.items() if use.at is not None}


@contextmanager
def _wholes_for_functions() -> Iterator[None]:
    """Whatever a `torch.autograd.Function` takes of weights is whole: others are refused there."""
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
    """Whether functions of the user's get its gradient, which may need all of it."""
    return bool(held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None))


def _granted(uses: Collection[Use]) -> bool:
    """Whether there is something new; then all but what is wished is to be found out anew.

    Only a forward without new wishes says for which weights a trial has failed.
    """
    has_wishes = any(use.is_wish_new for use in uses)
    failed = [use for use in uses if use.refused and not has_wishes]
    for use in failed:
        use.tries, use.wished = use.tries + 1, None
    for use in uses:
        use.refused = False
        if has_wishes or failed:
            use.renew()
    return has_wishes or bool(failed)


def without_data(arguments: Any) -> Any:
    """Arguments of a forward, for one without data."""
    return tree_map_only(Tensor, _without_data, arguments)


def _without_data(x: Tensor) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return torch.empty_like(x, device="meta")
    tile = torch.empty_like(x.to_local().detach(), device="meta")
    mesh = dry_mesh(x.mesh.grid, x.mesh.part)
    return SpatialTensor(tile, x.spatial_layout, mesh, x.spatial_dims)
