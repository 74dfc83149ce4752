"""Weights of a network of which each rank of the tensor axis has a part.

How each is divided follows from how the network uses it: its forward runs once, without data, and
every layer that meets a weight first says which way moves fewer numbers. A weight that no layer
of `channels.layers` takes stays whole on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_map_only

from spatialdl.channels import along, layers
from spatialdl.channels.moves import all_gather, own_part
from spatialdl.channels.tensor import ChannelTensor, part_of, whole_of
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.dry import Dry
from spatialdl.comm.mesh import dry_mesh
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.parallel.partition import Partition
from spatialdl.random import keyed
from spatialdl.spatial.shadow import meta_copy
from spatialdl.spatial.tensor import SpatialTensor

ROUNDS = 8
"""How often a network is looked at, at most, for wishes of operations behind its layers."""

__all__ = ["along", "layers"]  # which register what can be done on channels


@dataclass
class Use:
    """How a parameter or buffer is divided, in all modules that have it.

    Attributes:
        at: the dim that is divided; None if every rank has all of it.
        partition: of this dim.
        is_known: whether it is found out.
        wished: how the dim should be divided for what follows.
        form: what was asked for, see `check_plan`; None to find it out.
    """

    at: int | None = None
    partition: Partition | None = None
    is_known: bool = False
    wished: Partition | None = None
    form: str | None = None


class Weight(ChannelTensor):
    """A parameter or buffer of a module as its forward sees it, of the whole shape.

    Attributes:
        module, key: where it is, and its name there.
        is_cut: whether the module has this rank's part only.
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
        x: Weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.device, requires_grad=held.requires_grad
        )
        torch._C._set_throw_on_mutable_data_ptr(x)
        x.module, x.key, x.comm, x.use, x.is_cut = module, name, comm, use, False
        return x

    @property
    def part(self) -> Tensor:  # type: ignore[override]
        """What this rank has, asked for each time: a block that runs again swaps its buffers.

        A forward may have put something else there, too: a buffer that it computed.
        """
        held = _held(self.module, self.key)
        if self.is_whole:
            whole: Tensor = whole_of(held)
            return whole
        is_part = self.is_cut and held.shape[self.at] == self.partition.size_of(self.comm.rank)
        return held if is_part else part_of(held, self.at, self.partition, self.comm)

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

    def divide_for(self, size: int, unit: int, pieces: int) -> None:
        total = self.shape[self.at]
        pieces *= total // size
        least = unit * pieces * self.comm.size  # or a rank would have nothing of a piece
        if total % size == 0 and total % (unit * pieces) == 0 and total >= least:
            self.use.wished = Partition.even(total, self.comm.size, unit, pieces)

    def whole(self, part: Tensor | None = None) -> Tensor:
        """All of it, detached, or of something of its shape; all ranks must call it.

        Args:
            part: this rank's, such as what an optimizer keeps of it.
        """
        part = (self.part if part is None else part).detach()
        return part if self.is_whole else all_gather(part, self.at, self.partition, self.comm)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of something of its shape."""
        if self.is_whole:
            return whole
        return own_part(whole, self.at, self.partition, self.comm.rank)

    def again(self) -> Weight:
        """The same, with the type and device that the module's tensor has now."""
        renewed = Weight(self.module, self.key, self.shape, self.use, self.comm)
        renewed.is_cut = self.is_cut
        return renewed

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        copied = self.again()
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        return copied


def _held(module: nn.Module, name: str) -> Tensor:
    found = module._parameters.get(name)
    held = module._buffers[name] if found is None else found
    assert held is not None
    return held


def _places(network: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every name of every parameter and buffer: in full, its module, and its name there."""
    for path, module in network.named_modules(remove_duplicate=False):
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            if held is not None:
                yield f"{path}.{name}" if path else name, module, name, held


def _shown(network: nn.Module, uses: Mapping[str, Use], comm: Communicator) -> None:
    """Let the forwards of modules see weights of the whole shape."""
    for path, module, name, held in _places(network):
        if path in uses:
            vars(module)[name] = Weight(module, name, held.shape, uses[path], comm)


def weights_of(network: nn.Module) -> dict[str, Weight]:
    """What is divided, by name."""
    found = ((path, vars(module).get(name)) for path, module, name, _ in _places(network))
    return {path: one for path, one in found if isinstance(one, Weight)}


FORMS = ("output", "input", "replicate")
"""What can be asked for: that a layer's weight is divided by its outputs, by its inputs, or not."""

Plan = Mapping[str, str]
"""By names of modules with ``*`` and ``?``, which stand for all inside, one of `FORMS`; later ones
count."""


def check_plan(network: nn.Module, plan: Plan) -> None:
    """Refuse a plan with forms that there are not, or for modules that a network has not.

    Raises:
        ValueError: naming them.
    """
    paths = [path for path, _, _, _ in _places(network)]
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
    hooked = {path for path, _, _, held in _places(network) if _has_hooks(held)}
    of_state: dict[int, Use] = {}
    uses: dict[str, Use] = {}
    for path, _, _, held in _places(shadow):
        if held.dim() > 0 and held.is_floating_point():
            uses[path] = use = of_state.setdefault(id(held), Use())
            if isinstance(held, nn.Parameter):
                forms = [form for pattern, form in plan.items() if _matches(path, pattern)]
                use.form = forms[-1] if forms else use.form
                use.form = "replicate" if path in hooked else use.form
                use.is_known = use.form == "replicate"
    _shown(shadow, uses, dry)
    for module in shadow.modules():
        plain = {name: one for name, one in vars(module).items() if type(one) is Tensor}
        vars(module).update({name: one.to("meta") for name, one in plain.items()})
    for left in reversed(range(ROUNDS)):
        try:
            with torch.no_grad(), torch.device("meta"), keyed(0, 0):
                run(shadow)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedSpatialOp(
                f"how {type(network).__name__} uses its weights cannot be found out without data, "
                f"so they cannot be divided: {error}; take tensor=1"
            ) from error
        if not left or not _granted(of_state.values()):
            break
    return {path: use for path, use in uses.items() if use.at is not None}


def _has_hooks(held: Tensor) -> bool:
    """Whether functions of the user's get its gradient, which may need all of it."""
    return bool(held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None))


def _granted(uses: Collection[Use]) -> bool:
    """Whether there are new wishes; then all but what is wished is to be found out anew."""
    are_new = any(use.wished not in (None, use.partition) for use in uses)
    for use in uses if are_new else ():
        if use.wished is not None:
            use.partition = use.wished
        else:
            use.at, use.partition, use.is_known = None, None, use.form == "replicate"
    return are_new


def without_data(arguments: Any) -> Any:
    """Arguments of a forward, for one without data."""
    return tree_map_only(Tensor, _without_data, arguments)


def _without_data(x: Tensor) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return torch.empty_like(x, device="meta")
    tile = torch.empty_like(x.to_local().detach(), device="meta")
    mesh = dry_mesh(x.mesh.grid, x.mesh.part)
    return SpatialTensor(tile, x.spatial_layout, mesh, x.spatial_dims)


@torch.inference_mode(False)
@torch.no_grad()
def divide(network: nn.Module, uses: Mapping[str, Use], comm: Communicator) -> None:
    """Leave each rank its part of the weights, buffers and gradients of a network.

    Parameters stay the objects that they are, which optimizers know, and become smaller.
    """
    _shown(network, uses, comm)
    cut: set[int] = set()
    for weight in weights_of(network).values():
        held = _held(weight.module, weight.key)
        if id(held) not in cut:
            cut.add(id(held))
            grad, held.grad = held.grad, None
            held.data = own_part(held, weight.at, weight.partition, comm.rank).clone()
            if grad is not None:
                held.grad = own_part(grad, weight.at, weight.partition, comm.rank).clone()
        weight.is_cut = True


def _written_back(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """After ``module.name += x`` the buffer is what it was, not what forwards see of it."""
    if isinstance(value, Weight) and (value.module, value.key) == (module, name):
        return _held(module, name)
    return None


register_module_buffer_registration_hook(_written_back)  # type: ignore[arg-type]


def settle(network: nn.Module) -> None:
    """Buffers that forwards have computed become plain tensors again; all ranks must call it."""
    for _, module, name, held in list(_places(network)):
        if isinstance(held, ChannelTensor):
            weight = vars(module).get(name)
            module._buffers[name] = (
                weight.part if isinstance(weight, Weight) else whole_of(held)
            ).detach()


def renew(weights: Iterable[Weight]) -> None:
    """After parameters have been converted, moved or replaced: let forwards see them so."""
    for weight in weights:
        vars(weight.module)[weight.key] = weight.again()


@torch.no_grad()
def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict of the whole network, on every rank; all must call it."""
    settle(network)
    weights = weights_of(network)
    state: dict[str, Tensor] = network.state_dict()
    return {name: weights[name].whole() if name in weights else x for name, x in state.items()}


def own_state(network: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a state dict what this rank has; weights may be whole in it, or parts."""
    own = dict(state)
    for name, weight in weights_of(network).items():
        if name in own and own[name].shape == weight.shape:
            own[name] = weight.own(own[name])
    return own


def whole_outputs(outputs: Any) -> Any:
    """What a network returns, with all channels."""
    return tree_map_only(ChannelTensor, whole_of, outputs)
