"""Stage: consecutive steps of a network's forward with the modules that they call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.steps import IMAGE, Recording, Step, Value, output_of, run_step
from spatialdl.spatial.random import scope
from spatialdl.spatial.recompute import WEIGHTS, is_recomputed, recompute, weight_layers
from spatialdl.spatial.source_lines import replays
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import DisableTorchFunction, tree_leaves

OUTPUT = Value(-2)
"""The return value of a network, which need not be one tensor."""

SAMPLES = 2
"""Samples of the recording that decides the cut; BatchNorm needs more than one."""

_FROZEN = "rests_in_training"  # an attribute, so that copies of the layer have it too


class Stage(nn.Module):
    """Steps ``[start, stop)`` of a network, with its modules under the network's names.

    ``forward`` maps the tensors of `takes`, given the number of samples, to those of `gives`.
    Modules draw random numbers by their names, which do not depend on the cut.

    Attributes:
        takes, gives: values that pass its borders.
        writes: the inputs that it writes into.

    Args:
        owns: names of parameters, buffers and modules to keep here beside those of its steps.
        recompute: whether loose layers are recomputed in backward, see `pieces`.
    """

    def __init__(
        self,
        model: nn.Module,
        network: Forward,
        start: int,
        stop: int,
        owns: Sequence[str] = (),
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._network, self._start, self._stop = network, start, stop
        recording = network.of(SAMPLES, training=True)
        self._steps = recording.steps[start:stop]
        self._is_last = stop == len(recording.steps)
        self.takes, self.gives = crossing(recording, start, stop)
        self.writes = recording.written & set(self.takes)
        ends = values_in(recording.output) if self._is_last else []
        self._keeps = (*self.gives, *ends)
        self._drop = _unused_after(self._steps, self._keeps)
        for path, module in _modules(model, self._steps):
            _place(self, path, module)
        for path in (*owns, *(name for step in self._steps for name in step.attributes)):
            _place_tensor(self, path, model)
        self._pieces = self._recomputed() if recompute else []
        self._written_state = recording.written_state

    @property
    def paths(self) -> list[str]:
        """Paths of the modules that it calls, in order."""
        return [step.call for step in self._steps if isinstance(step.call, str)]

    def train(self, mode: bool = True) -> Stage:
        """Set training or evaluation mode as the whole network does."""
        super().train(mode)
        self._network.look_for_changes()
        self._network.set_modes(self, mode)
        return self

    def prepare(self, samples: int) -> None:
        """Record the forward for `samples` samples in both modes."""
        for training in (True, False):
            self._network.of(samples, training)

    def forward(self, values: dict[Value, Tensor], samples: int) -> dict[Value, Any]:
        recording = self._network.of(samples, self.training)
        values = dict(values)
        device = next((value.device for value in values.values()), torch.device("cpu"))
        with _copies_saved(self._written()):
            for part in self.parts:
                self.run_part(part, recording, values, device)
        outputs: dict[Value, Any] = {value: values[value] for value in self.gives}
        if self._is_last:
            outputs[OUTPUT] = output_of(recording, values)
        return outputs

    def _written(self) -> list[Tensor]:
        """Parameters and buffers that the forward writes into."""
        names = self._written_state
        if not names:
            return []
        state = (
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        )
        return [tensor for name, tensor in state if name in names]

    @property
    def parts(self) -> list[list[int]]:
        """Step numbers, counted from the first step, grouped by what is recomputed together."""
        return self._pieces or [[number] for number in range(len(self._steps))]

    def run_part(
        self,
        part: Sequence[int],
        recording: Recording,
        values: dict[Value, Tensor],
        device: torch.device,
    ) -> None:
        """Run one of `parts`: add its outputs to `values`, drop inputs after their last use."""
        if self._runs_again(part):
            self._run_again(recording, part, values, device)
        else:
            self._run(recording, part, values, device)
        for number in part:
            for value in self._drop[number]:
                values.pop(value, None)

    def _run(
        self,
        recording: Recording,
        numbers: Iterable[int],
        values: dict[Value, Tensor],
        device: torch.device,
    ) -> None:
        for number in numbers:
            step = recording.steps[self._start + number]
            with scope_of(step):
                run_step(step, self, values, device)

    def _run_again(
        self,
        recording: Recording,
        numbers: Sequence[int],
        values: dict[Value, Tensor],
        device: torch.device,
    ) -> None:
        takes, gives = self._steps[numbers[0]].takes, self._steps[numbers[-1]].gives

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            local = dict(zip(takes, tensors, strict=True))
            self._run(recording, numbers, local, device)
            return tuple(local[value] for value in gives)

        modules = [self.get_submodule(str(self._steps[number].call)) for number in numbers]
        outputs = recompute(run, *(values[value] for value in takes), modules=modules)
        values.update(zip(gives, outputs, strict=True))

    def _runs_again(self, numbers: Sequence[int]) -> bool:
        if not self._pieces or not isinstance(self._steps[numbers[0]].call, str):
            return False
        module = self.get_submodule(str(self._steps[numbers[0]].call))
        saves = len(numbers) > 1 or weight_layers(module) >= WEIGHTS
        return saves and not is_recomputed(module)

    def _recomputed(self) -> list[list[int]]:
        """Step numbers in groups that are recomputed together."""
        chunks: list[list[int]] = []
        for chain in _chains(self._steps, self._keeps):
            if not isinstance(self._steps[chain[0]].call, str):
                chunks.append(chain)
                continue
            layers = [self.get_submodule(str(self._steps[number].call)) for number in chain]
            bounds = [0, *accumulate(len(piece) for piece in pieces(layers))]
            chunks += [chain[a:b] for a, b in pairwise(bounds)]
        return chunks


def run_stage(module: nn.Module, values: dict[Value, Tensor], samples: int) -> dict[Value, Any]:
    """Return the outputs of a stage, or of a whole network."""
    if isinstance(module, Stage):
        outputs: dict[Value, Any] = module(values, samples)
        return outputs
    return {OUTPUT: module(values[IMAGE])}


replays(run_stage.__code__)


def run_stage_again(
    module: nn.Module, values: dict[Value, Tensor], samples: int
) -> dict[Value, Any]:
    """Rerun a stage with the same values; copies inputs that it writes into."""
    written = module.writes if isinstance(module, Stage) else values.keys()
    kept = {value: x.clone() if value in written else x for value, x in values.items()}
    return run_stage(module, kept, samples)


def takes_of(module: nn.Module) -> tuple[Value, ...]:
    """Inputs of a stage, or of a whole network."""
    return module.takes if isinstance(module, Stage) else (IMAGE,)


def crossing(
    recording: Recording, start: int, stop: int
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Values that the steps ``[start, stop)`` take from earlier and give to later steps."""
    inside, after = recording.steps[start:stop], recording.steps[stop:]
    used, later = ({value for step in some for value in step.takes} for some in (inside, after))
    if after:
        later |= set(values_in(recording.output))
    else:  # it returns values that earlier stages may have made
        used |= set(values_in(recording.output))
    takes = {value for value in used if value.step < start}
    if start == 0:
        takes.add(IMAGE)
    own_from = -1 if start == 0 else start
    gives = {value for value in later if own_from <= value.step < stop}
    return tuple(sorted(takes)), tuple(sorted(gives))


def values_in(output: Any) -> list[Value]:
    """The `Value` leaves of a network's output."""
    leaves = tree_leaves(output, is_leaf=lambda leaf: isinstance(leaf, Value))
    return [leaf for leaf in leaves if isinstance(leaf, Value)]


def _unused_after(steps: Sequence[Step], keeps: Sequence[Value]) -> list[list[Value]]:
    """Per step, the values with no later use, so that their memory can be freed."""
    wanted = set(keeps)
    unused_after: list[list[Value]] = []
    for step in reversed(steps):
        unused = [value for value in (*step.takes, *step.gives) if value not in wanted]
        wanted.update(unused)
        unused_after.append(unused)
    return unused_after[::-1]


def is_chain(recording: Recording) -> bool:
    """Whether a forward only calls modules, each on the output of the one before."""
    steps = recording.steps
    all_modules = all(isinstance(step.call, str) and step.call for step in steps)
    return all_modules and len(list(_chains(steps, values_in(recording.output)))) == 1


def _chains(steps: Sequence[Step], keeps: Sequence[Value]) -> Iterator[list[int]]:
    """Yield runs of modules, each the sole consumer of the output of the one before."""
    uses = Counter(value for step in steps for value in step.takes) + Counter(keeps)
    chain: list[int] = []
    for number, step in enumerate(steps):
        follows = bool(chain) and set(step.takes) == set(steps[number - 1].gives)
        alone = follows and all(uses[value] == 1 for value in step.takes)
        is_module = isinstance(step.call, str) and step.with_grad and not step.attributes
        if chain and not (alone and is_module and isinstance(steps[chain[0]].call, str)):
            yield chain
            chain = []
        chain.append(number)
    if chain:
        yield chain


def pieces(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group the layers of a chain into pieces, each recomputed as a whole in backward.

    A piece begins at a convolution or linear layer, so that its input is not modified in place. It
    holds two such layers and what follows them. Blocks, which recompute themselves, stay single.
    """
    result: list[list[nn.Module]] = []
    weights = WEIGHTS  # of the piece at the end of `found`
    for layer in layers:
        own = weight_layers(layer)
        is_block = is_recomputed(layer)
        begins = own > 0 and weights + own > WEIGHTS
        if is_block or begins or not result or weights == 0:
            result.append([layer])
            weights = 0 if is_block else own
        else:
            result[-1].append(layer)
            weights += own
    return result


# --- random numbers


def scope_of(step: Step) -> AbstractContextManager[None]:
    """The scope of a step's random numbers, see `random.scope`."""
    return scope(f"{step.path}#{step.nth}" if step.nth else step.path)


class _Entered(threading.local):
    """Per-thread hook state: copies of a network on threads that take turns share its hooks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.scopes: list[AbstractContextManager[None]] = []


def scope_by_name(model: nn.Module, recording: Recording) -> None:
    """Make the modules of an uncut network draw the random numbers that its stages draw."""
    often = Counter(step.call for step in recording.steps)
    thread = _Entered()

    def restart(module: nn.Module, args: Any) -> None:
        thread.calls.clear()

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            nth, thread.calls[path] = thread.calls[path], thread.calls[path] + 1
            once = often[path] == 1  # the call may be repeated by recomputation
            thread.scopes.append(scope(path if once or not nth else f"{path}#{nth}"))
            thread.scopes[-1].__enter__()

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        thread.scopes.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(restart)
    for path in recording.drawing:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(enter(path))
        module.register_forward_hook(leave, always_call=True)


# --- names


def _modules(model: nn.Module, steps: Sequence[Step]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the steps call, under all of their names, outer ones first."""
    called = {id(model.get_submodule(step.call)) for step in steps if isinstance(step.call, str)}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in called:
            yield path, module


def _holder(stage: nn.Module, parents: Sequence[str]) -> nn.Module:
    holder = stage
    for parent in parents:
        if parent not in holder._modules:
            holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
    return holder


def _place(stage: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    holder = _holder(stage, parents)
    if holder._modules.get(name) is not module:
        holder.add_module(name, module)


def _place_tensor(stage: nn.Module, path: str, model: nn.Module) -> None:
    *parents, name = path.split(".")
    owner = model.get_submodule(".".join(parents))
    holder = _holder(stage, parents)
    if name in owner._parameters:
        holder._parameters.setdefault(name, owner._parameters[name])
    elif name not in holder._buffers:
        persistent = name not in owner._non_persistent_buffers_set
        holder.register_buffer(name, owner._buffers[name], persistent)


@contextmanager
def _copies_saved(state: Sequence[Tensor]) -> Iterator[None]:
    """Make autograd save copies of tensors that the forward modifies, and no other copies.

    Several micro-batches are in flight at once: the forward of the second would modify what
    autograd saved for the backward of the first.
    """
    if not state or not torch.is_grad_enabled():
        yield
        return
    memories = {_memory(one) for one in state}

    def pack(saved: Tensor) -> Tensor:
        if isinstance(saved, SpatialTensor) or saved.layout != torch.strided:
            return saved
        return saved.detach().clone() if _memory(saved) in memories else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield


def _memory(tensor: Tensor) -> int:
    with DisableTorchFunction():  # not recorded as an operation of the forward
        return tensor.untyped_storage().data_ptr()


def rest_in_training(layer: nn.Module) -> None:
    """Keep a layer in evaluation mode during training: BatchNorm with frozen statistics.

    Frozen weights do not imply it: in PyTorch their BatchNorm still updates its statistics.
    """
    setattr(layer, _FROZEN, True)


def start_training(stage: nn.Module) -> None:
    """Set training mode, except in layers of `rest_in_training`."""
    stage.train()
    for layer in stage.modules():
        if getattr(layer, _FROZEN, False):
            layer.eval()
