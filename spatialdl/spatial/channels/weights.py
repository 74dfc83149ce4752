"""Weights of a network divided over the tensor axis.

Modules hold this rank's part; their forwards see a
weight of the whole shape.

A forward without data determines how each weight is divided. The first layer that uses it chooses
the division that sends less. A parameter that no layer of `channels.layers` uses, nor a pointwise
operation with divided channels, is replicated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import dry_mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.partition import FORMS, Partition
from spatialdl.spatial.channels import along, layers, products, shapes
from spatialdl.spatial.channels.moves import all_gather, local_part
from spatialdl.spatial.channels.tensor import ChannelTensor, all_channels, local_channels
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.spatial.random import keyed
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import (
    make_wrapper_subclass,
    set_throw_on_mutable_data_ptr,
    tree_map_only,
)

__all__ = [
    "along",
    "layers",
    "products",
    "shapes",
]  # imported to register handlers


@dataclass
class Use:
    """The division of a parameter or buffer, shared by all modules that have it.

    Attributes:
        at: the divided dim; None if replicated.
        partition: of this dim.
        is_known: whether the division is decided.
        requested: the partition that later operations request.
        form: the value in the tensor plan, see `check_plan`; None if not planned.
    """

    at: int | None = None
    partition: Partition | None = None
    is_known: bool = False
    requested: Partition | None = None
    form: str | None = None

    @property
    def has_new_request(self) -> bool:
        return self.requested not in (None, self.partition)

    def renew(self) -> None:
        """Reset before the next forward: apply the request, or make the division undecided."""
        if self.requested is not None:
            self.partition = self.requested
        else:
            self.at, self.partition = None, None
            self.is_known = self.form == "replicate"


class Weight(ChannelTensor):
    """A parameter or buffer with the whole shape, as the forward of its module sees it.

    Attributes:
        module, key: the module, and the name in it.
        is_cut: whether the module holds only this rank's part.
    """

    module: nn.Module
    key: str
    use: Use
    is_cut: bool

    @staticmethod
    def __new__(
        cls, module: nn.Module, name: str, shape: torch.Size, use: Use, comm: Communicator
    ) -> Weight:
        held = _held(module, name)
        x: Weight = make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.device, requires_grad=held.requires_grad
        )
        set_throw_on_mutable_data_ptr(x)
        x.module, x.key, x.comm, x.use, x.is_cut = module, name, comm, use, False
        return x

    @property
    def part(self) -> Tensor:  # type: ignore[override]
        """This rank's part, read from the module each time, as recomputation swaps buffers.

        A forward may also have replaced the buffer by a computed tensor.
        """
        held = _held(self.module, self.key)
        if self.is_whole:
            whole: Tensor = all_channels(held)
            return whole
        is_part = self.is_cut and held.shape[self.at] == self.partition.size_of(self.comm.rank)
        return held if is_part else local_channels(held, self.at, self.partition, self.comm)

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return self.use.at is None

    @property
    def at(self) -> int:  # type: ignore[override]
        assert self.use.at is not None
        return self.use.at

    @property
    def partition(self) -> Partition:  # type: ignore[override]
        assert self.use.partition is not None
        return self.use.partition

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        return not self.use.is_known

    @property
    def form(self) -> str | None:  # type: ignore[override]
        return self.use.form

    def decide(self, at: int | None = None, partition: Partition | None = None) -> None:
        if not self.use.is_known:
            self.use.at, self.use.partition, self.use.is_known = at, partition, True

    def divide_as(self, partition: Partition) -> bool:
        fits = partition.size == self.shape[self.at] and partition.covers_all_ranks
        if fits and self.use.requested is None:  # requests for heads take precedence
            self.use.requested = partition
        return self.use.requested == partition

    def divide_for(self, size: int, unit: int, pieces: int) -> None:
        total = self.shape[self.at]
        pieces *= total // size
        least = unit * pieces * self.comm.size  # else a rank has no part of a piece
        if total % size == 0 and total % (unit * pieces) == 0 and total >= least:
            self.use.requested = Partition.even(total, self.comm.size, unit, pieces)

    def full(self, part: Tensor | None = None) -> Tensor:
        """The whole weight, or a whole tensor of its shape, detached; collective.

        Args:
            part: this rank's part of another tensor, such as an optimizer state.
        """
        part = (self.part if part is None else part).detach()
        return part if self.is_whole else all_gather(part, self.at, self.partition, self.comm)

    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the weight's shape."""
        if self.is_whole:
            return whole
        return local_part(whole, self.at, self.partition, self.comm.rank)

    def renewed(self) -> Weight:
        """This weight with the current dtype and device of the module's tensor."""
        new = Weight(self.module, self.key, self.shape, self.use, self.comm)
        new.is_cut = self.is_cut
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        copied = self.renewed()
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        return copied


def _held(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters.get(name)
    held = module._buffers[name] if parameter is None else parameter
    assert held is not None
    return held


def places(network: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (full name, module, name in the module, tensor) of each parameter and buffer."""
    for path, module in network.named_modules(remove_duplicate=False):
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            if held is not None:
                yield f"{path}.{name}" if path else name, module, name, held


def install_weights(network: nn.Module, uses: Mapping[str, Use], comm: Communicator) -> None:
    """Set `Weight` attributes of the whole shape, which the forwards of modules see."""
    for path, module, name, held in places(network):
        if path in uses:
            vars(module)[name] = Weight(module, name, held.shape, uses[path], comm)


def weights_of(network: nn.Module) -> dict[str, Weight]:
    """The `Weight` attributes of a network by name."""
    attributes = ((path, vars(module).get(name)) for path, module, name, _ in places(network))
    return {path: one for path, one in attributes if isinstance(one, Weight)}


@torch.inference_mode(False)
@torch.no_grad()
def divide(network: nn.Module, uses: Mapping[str, Use], comm: Communicator) -> None:
    """Reduce weights, buffers and gradients of a network to this rank's parts.

    Parameters are the same objects afterwards, as optimizers reference them, but smaller.
    """
    install_weights(network, uses, comm)
    cut: set[int] = set()
    for weight in weights_of(network).values():
        held = _held(weight.module, weight.key)
        if id(held) not in cut:
            cut.add(id(held))
            grad, held.grad = held.grad, None
            held.data = local_part(held, weight.at, weight.partition, comm.rank).clone()
            if grad is not None:
                held.grad = local_part(grad, weight.at, weight.partition, comm.rank).clone()
        weight.is_cut = True


@contextmanager
def held_weights(network: nn.Module) -> Iterator[None]:
    """A context in which attributes of modules are this rank's parts, not whole weights."""
    weights = weights_of(network).values()
    for weight in weights:
        vars(weight.module).pop(weight.key, None)
    try:
        yield
    finally:
        for weight in weights:
            vars(weight.module)[weight.key] = weight


def _keep_buffer(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """Keep the buffer itself after ``module.name += x``, which assigns the `Weight`."""
    if isinstance(value, Weight) and (value.module, value.key) == (module, name):
        return _held(module, name)
    return None


register_module_buffer_registration_hook(_keep_buffer)  # type: ignore[arg-type]


def settle(network: nn.Module) -> None:
    """Turn buffers computed by forwards into plain tensors; collective."""
    for _, module, name, held in list(places(network)):
        if isinstance(held, ChannelTensor):
            weight = vars(module).get(name)
            module._buffers[name] = (
                weight.part if isinstance(weight, Weight) else all_channels(held)
            ).detach()


def renew(weights: Iterable[Weight]) -> None:
    """Update weights after parameters were converted, moved or replaced."""
    for weight in weights:
        vars(weight.module)[weight.key] = weight.renewed()


@torch.no_grad()
def full_state(network: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the whole network, on every rank; collective.

    Args:
        state: a state dict of this rank's parts; None for the network's own.
    """
    settle(network)
    weights = weights_of(network)
    if state is not None:
        return {name: weights[name].full(x) if name in weights else x for name, x in state.items()}
    own: dict[str, Tensor] = network.state_dict()  # forwards may have stored whole tensors
    return {name: weights[name].full() if name in weights else x for name, x in own.items()}


def local_state(network: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's parts of a state dict in which weights may be whole or parts."""
    own = dict(state)
    for name, weight in weights_of(network).items():
        if name in own and own[name].shape == weight.shape:
            own[name] = weight.local(own[name])
    return own


def full_outputs(outputs: Any) -> Any:
    """The outputs of a network, with all channels."""
    return tree_map_only(ChannelTensor, all_channels, outputs)


# --- the use of weights in a forward


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
            with torch.no_grad(), on_meta(), keyed(0, 0):
                run(shadow)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedSpatialOp(
                f"the forward of {type(network).__name__} cannot run without data, so its weights "
                f"cannot be divided: {error}; use tensor=1"
            ) from error
        if not left or not _apply_requests(of_state.values()):
            break
    return {path: use for path, use in uses.items() if use.at is not None}


def _has_hooks(held: Tensor) -> bool:
    """Whether user hooks receive the gradient; they may need all of it."""
    return bool(held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None))


def _apply_requests(uses: Collection[Use]) -> bool:
    """Whether partitions were requested, for which all uses are renewed."""
    if not any(use.has_new_request for use in uses):
        return False
    for use in uses:
        use.renew()
    return True


def without_data(arguments: Any) -> Any:
    """Arguments of a forward on the meta device."""
    return tree_map_only(Tensor, _without_data, arguments)


def _without_data(x: Tensor) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return torch.empty_like(x, device="meta")
    tile = torch.empty_like(x.to_local().detach(), device="meta")
    mesh = dry_mesh(x.mesh.grid, x.mesh.part)
    return SpatialTensor(tile, x.spatial_layout, mesh, x.spatial_dims)
