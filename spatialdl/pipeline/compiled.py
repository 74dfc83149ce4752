"""Stages whose steps run as `torch.compile` makes them, where that gives the same numbers.

Steps that draw random numbers, write into buffers other than BatchNorm's, have hooks or run again
in backward stay as they are; what lies between them is compiled. Which these are is seen in a first
run, which compiles nothing.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm

from spatialdl.pipeline.stage import Stage
from spatialdl.pipeline.statistics import SliceStatistics, is_plain, under_checkpoint
from spatialdl.pipeline.steps import Recording, Step, Value, run_step
from spatialdl.random.streams import numbers_drawn
from spatialdl.spatial.norm import StatisticsOver

log = logging.getLogger("spatialdl.pipeline")

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "fallback_random": True,
    "emulate_precision_casts": True,
}
"""Of inductor: numbers as PyTorch draws them, and rounds them between operations."""

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def compile_stages(stages: Iterable[nn.Module]) -> None:
    """From now on run stages of `pipeline.partition.cut` compiled."""
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(f"{type(stage).__name__} was not cut to be compiled")
        stage._run_steps = CompiledSteps()


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where that would fail in the first step.

    Raises:
        ValueError: if there is no compiler, or none for the device.
    """
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        raise ValueError(
            f"trainer.compile=true: PyTorch's inductor does not compile for {device.type}: leave "
            "it out"
        )
    if device.type != "cpu" and not has_triton():
        raise ValueError(
            f"trainer.compile=true needs Triton for {device.type}, which is not installed here: "
            "install PyTorch with it, or leave it out"
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "trainer.compile=true needs a C++ compiler when it runs, and there is none here: "
            "install g++ or name one by CXX=..., or leave it out"
        ) from error


class CompiledSteps:
    """Runs the steps of a stage; what is alike in all runs is compiled."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool, bool], tuple[Recording, list[_Run]]] = {}

    def __deepcopy__(self, memo: object) -> CompiledSteps:
        return CompiledSteps()

    def __call__(
        self,
        stage: Stage,
        recording: Recording,
        samples: int,
        values: dict[Value, Tensor],
        device: torch.device,
    ) -> None:
        """Run all steps of a stage for a number of samples; what they give is added to `values`."""
        key = samples, stage.training, torch.is_grad_enabled()
        known, runs = self._found.get(key, (None, []))
        if known is not recording:
            reasons = self._watched(stage, recording, values, device)
            steps = stage._span(recording)
            runs = [
                _Run(stage, steps, numbers, device, is_compiled)
                for numbers, is_compiled in _bounds(stage, steps, reasons)
            ]
            self._found[key] = recording, runs
            _tell(runs, reasons, stage.training)
            return
        for run in runs:
            run(stage, recording, values, device)

    def _watched(
        self, stage: Stage, recording: Recording, values: dict[Value, Tensor], device: torch.device
    ) -> list[str]:
        """Run the steps as they are, and find out by step why it cannot be compiled, or ""."""
        kept = {key.path for key in stage._network.kept}
        calls: Counter[nn.Module] = Counter()
        reasons = []
        for number, step in enumerate(stage._span(recording)):
            with _Watch(stage, step, kept, calls) as watch:
                stage.run_part([number], recording, values, device)
            reasons.append(watch.reason)
        return reasons


def _bounds(
    stage: Stage, steps: Sequence[Step], reasons: Sequence[str]
) -> Iterator[tuple[range, bool]]:
    """Consecutive steps that run together, and whether they are compiled: not a layer alone."""
    start = 0
    for stop in range(1, len(steps) + 1):
        if stop < len(steps) and bool(reasons[stop]) == bool(reasons[start]):
            continue
        layers = (stage.get_submodule(path) for path in _paths(steps[start:stop]))
        is_more = stop - start > 1 or any(any(layer.children()) for layer in layers)
        yield range(start, stop), is_more and not reasons[start]
        start = stop


def _paths(steps: Sequence[Step]) -> list[str]:
    return [step.call for step in steps if isinstance(step.call, str)]


def _tell(runs: Sequence[_Run], reasons: Sequence[str], training: bool) -> None:
    compiled = sum(len(run.numbers) for run in runs if run.is_compiled)
    left = Counter(reason for reason in reasons if reason)
    log.log(
        logging.INFO if compiled else logging.WARNING,
        "trainer.compile: %d of %d steps of this stage are compiled in %s%s",
        compiled,
        len(reasons),
        "training" if training else "evaluation",
        "".join(f"; {count} not: {reason}" for reason, count in left.items()),
    )


class _Run:
    """Consecutive steps of a stage, compiled or as they are.

    Args:
        steps: of the stage.
        numbers: of these steps among them.
        is_compiled: whether they are compiled.
    """

    def __init__(
        self,
        stage: Stage,
        steps: Sequence[Step],
        numbers: range,
        device: torch.device,
        is_compiled: bool,
    ) -> None:
        self.numbers, self.is_compiled = numbers, is_compiled
        own = [steps[number] for number in numbers]
        given = [value for step in own for value in step.gives]
        self._dropped = {value for number in numbers for value in stage._drop[number]}
        taken = dict.fromkeys(value for step in own for value in step.takes)
        self._takes = tuple(value for value in taken if value not in given)
        self._gives = tuple(value for value in given if value not in self._dropped)
        layers = [stage.get_submodule(path) for path in _paths(own)]
        self._modules = [module for layer in layers for module in layer.modules()]
        self._norms = [one for one in self._modules if isinstance(one, _BatchNorm)]
        self._plain = _function(own, self._takes, self._gives, device)
        self._compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
            self._plain, fullgraph=True, dynamic=False, options=OPTIONS
        )

    def __call__(
        self,
        stage: Stage,
        recording: Recording,
        values: dict[Value, Tensor],
        device: torch.device,
    ) -> None:
        """Run the steps; what they give is added to `values`, what they take last is dropped."""
        # PyTorch does not look for hooks that are there for a while only
        if not self.is_compiled or any(map(_has_hooks, self._modules)):
            for number in self.numbers:
                stage.run_part([number], recording, values, device)
            return
        tensors = [values[value] for value in self._takes]
        with ExitStack() as around:
            for norm in self._norms:
                around.enter_context(_hooks_around(norm))
            # modes that look at each function of PyTorch have seen the first run
            around.enter_context(torch._C.DisableTorchFunction())
            outputs = self._outputs(stage, tensors)
        values.update(zip(self._gives, outputs, strict=True))
        for value in self._dropped:
            values.pop(value, None)

    def _outputs(self, stage: Stage, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._compiled(stage, *tensors)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before anything has run
            reason = str(error).strip().partition("\n")[0]
            first, last = self.numbers[0], self.numbers[-1]
            log.warning(
                "trainer.compile: steps %d to %d of this stage stay as they are: %s",
                *(first, last, reason),
            )
            self._compiled = self._plain
            return self._plain(stage, *tensors)


def _function(
    steps: Sequence[Step], takes: Sequence[Value], gives: Sequence[Value], device: torch.device
) -> Callable[..., tuple[Tensor, ...]]:
    """The steps as a function of a stage and tensors, with code of its own.

    PyTorch counts by code object how often it has compiled, and gives up after a few times.
    """

    def run(stage: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(takes, tensors, strict=True))
        for step in steps:
            run_step(step, stage, values, device)
        return tuple(values[value] for value in gives)

    code = run.__code__.replace()
    own: Callable[..., tuple[Tensor, ...]] = FunctionType(
        code, run.__globals__, run.__name__, run.__defaults__, run.__closure__
    )
    return own


@contextmanager
def _hooks_around(norm: _BatchNorm) -> Iterator[None]:
    """Around compiled steps that call a BatchNorm once: its hooks, instead of around its call.

    Uncompiled forwards, of which autograd has kept the running statistics, do not count a version.
    """
    hooks = {name: getattr(norm, name) for name in _HOOKS}
    for hook in hooks["_forward_pre_hooks"].values():
        hook(norm, ())
    for name in _HOOKS:
        setattr(norm, name, OrderedDict())
    running = [one for one in (norm.running_mean, norm.running_var) if one is not None]
    try:
        with _unsafe_preserve_version_counter(tuple(running)):
            yield
    finally:
        for name, known in hooks.items():
            setattr(norm, name, known)
        for hook in hooks["_forward_hooks"].values():
            hook(norm, (), None)


class _Watch:
    """Around a step: finds out what keeps it from being compiled.

    Attributes:
        reason: of that, after the step; empty if nothing does.
    """

    def __init__(self, stage: Stage, step: Step, kept: set[str], calls: Counter[nn.Module]) -> None:
        self.reason = ""
        self._step, self._calls = step, calls
        root = stage.get_submodule(step.call) if isinstance(step.call, str) else nn.Module()
        self._modules = list(root.modules())
        path = step.call if isinstance(step.call, str) else None
        self._keeps = path is not None and any(f"{k}.".startswith(f"{path}.") for k in kept)
        attributes = {name: getattr(stage.get_submodule(h), n) for name, h, n in _split(step)}
        self._state = [*attributes.values(), *_state(root)]
        self._norms = [one for one in self._modules if isinstance(one, _BatchNorm)]
        self._again = False

    def __enter__(self) -> _Watch:
        self._versions = [one._version for one in self._state]
        self._drawn = numbers_drawn()
        self.reason = self._before()
        self._handles = [one.register_forward_pre_hook(self._called) for one in self._norms]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.reason = self.reason or self._after()

    def _called(self, norm: nn.Module, args: Any) -> None:
        self._calls[norm] += 1
        self._again |= under_checkpoint()

    def _before(self) -> str:
        if not self._step.with_grad or self._step.others:
            return "it switches gradients off, or returns more than tensors"
        if self._keeps:
            return "it changes attributes of its own"
        if any(_has_hooks(module) for module in self._modules):
            return "it has hooks"
        for norm in self._norms:
            if norm.training and (norm.momentum is None or not is_plain(norm)):
                return "BatchNorm with an average over all batches, or a forward of its own"
            if norm.training and StatisticsOver.comm is not None:
                return "BatchNorm over replicas talks to other ranks"
        return ""

    def _after(self) -> str:
        if numbers_drawn() != self._drawn:
            return "it draws random numbers"
        if self._again:
            return "BatchNorm in torch.utils.checkpoint"
        if any(self._calls[norm] > 1 for norm in self._norms):
            return "it calls a BatchNorm twice"
        if [one._version for one in self._state] != self._versions:
            return "it writes into buffers or weights"
        return ""


def _split(step: Step) -> Iterator[tuple[str, str, str]]:
    for path in step.attributes:
        holder, _, name = path.rpartition(".")
        yield path, holder, name


def _state(root: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, without the running statistics of BatchNorm."""
    yield from root.parameters()
    for module in root.modules():
        if not (isinstance(module, _BatchNorm) and is_plain(module)):
            yield from (one for one in module._buffers.values() if one is not None)


def _has_hooks(module: nn.Module) -> bool:
    """Hooks other than those that keep BatchNorm's statistics, which `_Segment` calls itself."""
    hooks = [
        *(*module._forward_pre_hooks.values(), *module._forward_hooks.values()),
        *(*module._backward_pre_hooks.values(), *module._backward_hooks.values()),
    ]
    return any(not isinstance(getattr(one, "__self__", None), SliceStatistics) for one in hooks)
