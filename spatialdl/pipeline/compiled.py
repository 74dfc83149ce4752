"""Stages whose steps are compiled by `torch.compile`, where results stay the same.

Steps that draw random numbers, write into buffers other than BatchNorm's, have hooks or are
recomputed in backward run eagerly; the steps between them are compiled. A first, eager run finds
out which these are.
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

from spatialdl.pipeline.stage import Stage
from spatialdl.pipeline.statistics import SliceStatistics, is_plain
from spatialdl.pipeline.steps import Recording, Step, Value, run_step
from spatialdl.random.streams import numbers_drawn
from spatialdl.spatial.norm import StatisticsOver
from spatialdl.torch_internals import (
    BatchNormBase,
    DisableTorchFunction,
    top_saved_tensors_hooks,
    unsafe_preserve_version_counter,
)

log = logging.getLogger("spatialdl.pipeline")

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "fallback_random": True,
    "emulate_precision_casts": True,
}
"""Options of inductor: PyTorch's random numbers, and its rounding between operations."""

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def compile_stages(stages: Iterable[nn.Module]) -> None:
    """Switch stages of `pipeline.partition.cut` to compiled steps."""
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(f"{type(stage).__name__} was not cut to be compiled")
        stage._run_steps = CompiledSteps()


def check_compiler(device: torch.device) -> None:
    """Check for a compiler, rather than fail in the first step.

    Raises:
        ValueError: if there is no compiler, or inductor does not support the device.
    """
    from spatialdl.torch_internals import (
        InvalidCxxCompiler,
        get_cpp_compiler,
        get_scheduling_for_device,
        has_triton,
        init_backend_registration,
    )

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        raise ValueError(
            f"trainer.compile=true: PyTorch's inductor does not support {device.type}: leave it out"
        )
    if device.type != "cpu" and not has_triton():
        raise ValueError(
            f"trainer.compile=true needs Triton for {device.type}, which is not installed: "
            "install PyTorch with it, or leave it out"
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "trainer.compile=true needs a C++ compiler at run time, and none was found: "
            "install g++, set CXX=..., or leave it out"
        ) from error


class CompiledSteps:
    """Runs the steps of a stage, compiled where they do not differ from run to run."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, bool, bool], tuple[Recording, list[_Run]]] = {}

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
        """Run all steps of a stage for `samples` samples and add their outputs to `values`."""
        key = samples, stage.training, torch.is_grad_enabled()
        known, runs = self._runs.get(key, (None, []))
        if known is not recording:
            reasons = self._first_run(stage, recording, values, device)
            steps = stage._span(recording)
            runs = [
                _Run(stage, steps, numbers, device, is_compiled)
                for numbers, is_compiled in _bounds(stage, steps, reasons)
            ]
            self._runs[key] = recording, runs
            _log_runs(runs, reasons, stage.training)
            return
        for run in runs:
            run(stage, recording, values, device)

    def _first_run(
        self, stage: Stage, recording: Recording, values: dict[Value, Tensor], device: torch.device
    ) -> list[str]:
        """Run the steps eagerly; return per step why it cannot be compiled, or ""."""
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
    """Yield runs of steps and whether to compile each; a single layer is not worth it."""
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


def _log_runs(runs: Sequence[_Run], reasons: Sequence[str], training: bool) -> None:
    compiled = sum(len(run.numbers) for run in runs if run.is_compiled)
    skipped = Counter(reason for reason in reasons if reason)
    log.log(
        logging.INFO if compiled else logging.WARNING,
        "trainer.compile: %d of %d steps of this stage are compiled in %s%s",
        compiled,
        len(reasons),
        "training" if training else "evaluation",
        "".join(f"; {count} not: {reason}" for reason, count in skipped.items()),
    )


class _Run:
    """Consecutive steps of a stage, compiled or eager.

    Args:
        steps: of the stage.
        numbers: of the steps of this run.
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
        outputs = [value for step in own for value in step.gives]
        self._dropped = {value for number in numbers for value in stage._drop[number]}
        inputs = dict.fromkeys(value for step in own for value in step.takes)
        self._takes = tuple(value for value in inputs if value not in outputs)
        self._gives = tuple(value for value in outputs if value not in self._dropped)
        layers = [stage.get_submodule(path) for path in _paths(own)]
        self._modules = [module for layer in layers for module in layer.modules()]
        self._norms = [module for module in self._modules if isinstance(module, BatchNormBase)]
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
        """Run the steps: add their outputs to `values`, drop inputs after their last use."""
        # torch.compile does not notice hooks that exist temporarily
        if not self.is_compiled or any(map(_has_hooks, self._modules)):
            for number in self.numbers:
                stage.run_part([number], recording, values, device)
            return
        tensors = [values[value] for value in self._takes]
        with ExitStack() as stack:
            for norm in self._norms:
                stack.enter_context(_hooks_around(norm))
            # function modes already saw the first run
            stack.enter_context(DisableTorchFunction())
            outputs = self._outputs(stage, tensors)
        values.update(zip(self._gives, outputs, strict=True))
        for value in self._dropped:
            values.pop(value, None)

    def _outputs(self, stage: Stage, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from spatialdl.torch_internals import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._compiled(stage, *tensors)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before any step has run
            reason = str(error).strip().partition("\n")[0]
            first, last = self.numbers[0], self.numbers[-1]
            log.warning(
                "trainer.compile: steps %d to %d of this stage are not compiled: %s",
                *(first, last, reason),
            )
            self._compiled = self._plain
            return self._plain(stage, *tensors)


def _function(
    steps: Sequence[Step], takes: Sequence[Value], gives: Sequence[Value], device: torch.device
) -> Callable[..., tuple[Tensor, ...]]:
    """Make a function of a stage and tensors from steps, with its own code object.

    PyTorch limits recompilations per code object.
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
def _hooks_around(norm: BatchNormBase) -> Iterator[None]:
    """Run the hooks of a BatchNorm around compiled steps that call it once.

    Running statistics keep their version counter, as uncompiled forwards may have saved them for
    backward.
    """
    hooks = {name: getattr(norm, name) for name in _HOOKS}
    for hook in hooks["_forward_pre_hooks"].values():
        hook(norm, ())
    for name in _HOOKS:
        setattr(norm, name, OrderedDict())
    running = [
        statistic for statistic in (norm.running_mean, norm.running_var) if statistic is not None
    ]
    try:
        with unsafe_preserve_version_counter(tuple(running)):
            yield
    finally:
        for name, known in hooks.items():
            setattr(norm, name, known)
        for hook in hooks["_forward_hooks"].values():
            hook(norm, (), None)


class _Watch:
    """Context of a step that finds out why it cannot be compiled.

    Attributes:
        reason: set after the step; empty if it can be compiled.
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
        self._norms = [module for module in self._modules if isinstance(module, BatchNormBase)]
        self._again = False

    def __enter__(self) -> _Watch:
        self._versions = [tensor._version for tensor in self._state]
        self._drawn, self._hooks = numbers_drawn(), top_saved_tensors_hooks(False)
        self.reason = self._before()
        self._handles = [norm.register_forward_pre_hook(self._called) for norm in self._norms]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.reason = self.reason or self._after()

    def _called(self, norm: nn.Module, args: Any) -> None:
        self._calls[norm] += 1
        # a checkpoint, which reruns the layer in backward; `recompute` is not compiled
        self._again |= top_saved_tensors_hooks(False) != self._hooks

    def _before(self) -> str:
        if not self._step.with_grad or self._step.non_tensors:
            return "it disables gradients, or returns more than tensors"
        if self._keeps:
            return "it changes its attributes"
        if any(_has_hooks(module) for module in self._modules):
            return "it has hooks"
        for norm in self._norms:
            if norm.training and (norm.momentum is None or not is_plain(norm)):
                return "BatchNorm with a cumulative average, or a custom forward"
            if norm.training and StatisticsOver.comm is not None:
                return "BatchNorm over replicas communicates"
        return ""

    def _after(self) -> str:
        if numbers_drawn() != self._drawn:
            return "it draws random numbers"
        if self._again:
            return "BatchNorm in torch.utils.checkpoint"
        if any(self._calls[norm] > 1 for norm in self._norms):
            return "it calls a BatchNorm twice"
        if [tensor._version for tensor in self._state] != self._versions:
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
        if not (isinstance(module, BatchNormBase) and is_plain(module)):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _has_hooks(module: nn.Module) -> bool:
    """Whether it has hooks other than those of `SliceStatistics`, which `_Run` calls."""
    hooks = [
        *(*module._forward_pre_hooks.values(), *module._forward_hooks.values()),
        *(*module._backward_pre_hooks.values(), *module._backward_hooks.values()),
    ]
    return any(not isinstance(getattr(hook, "__self__", None), SliceStatistics) for hook in hooks)
