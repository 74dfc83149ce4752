"""Blocks of stages compiled by `torch.compile`, where results stay the same.

Blocks are modules with layers of their own that the recorded forward calls as a whole: residual
blocks, layers of a transformer. Those that draw random numbers, write into buffers other than
BatchNorm's, change attributes or have hooks run uncompiled, as does all that is between blocks.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.pipeline.stage import Stage
from spatialdl.pipeline.statistics import SliceStatistics, is_plain
from spatialdl.pipeline.steps import Recording, Step, Value, run_step
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
    """Switch stages of `pipeline.partition.cut` to compiled blocks."""
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(f"{type(stage).__name__} was not cut to be compiled")
        stage._run_steps = CompiledBlocks()


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


class CompiledBlocks:
    """Runs the steps of a stage, of which blocks are compiled.

    The first run for a number of samples is uncompiled, and finds out which blocks can be.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool, bool], tuple[Recording, dict[int, _Block]]] = {}

    def __deepcopy__(self, memo: object) -> CompiledBlocks:
        return CompiledBlocks()

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
        known, blocks = self._found.get(key, (None, {}))
        if known is not recording:
            self._found[key] = recording, _first_run(stage, recording, values, device)
            return
        for number, step in enumerate(stage._span(recording)):
            block = blocks.get(number)
            # torch.compile does not notice hooks that exist temporarily
            if block is None or block.has_hooks():
                stage.run_part([number], recording, values, device)
                continue
            block.run(stage, step, values, device)
            for value in stage._drop[number]:
                values.pop(value, None)


def _first_run(
    stage: Stage, recording: Recording, values: dict[Value, Tensor], device: torch.device
) -> dict[int, _Block]:
    """Run all steps uncompiled; return the blocks to compile by the numbers of their steps."""
    blocks, reasons = {}, []
    for number, step in enumerate(stage._span(recording)):
        module = stage.get_submodule(step.call) if isinstance(step.call, str) else nn.Module()
        if not any(module.children()):
            stage.run_part([number], recording, values, device)
            continue
        block = _Block(module)
        with block.counted() as calls:
            stage.run_part([number], recording, values, device)
        reasons.append(block.reason(stage, recording, step, calls))
        if not reasons[-1]:
            blocks[number] = block
    skipped = Counter(filter(None, reasons))
    log.log(
        logging.WARNING if reasons and not blocks else logging.INFO,
        "trainer.compile: %d of %d blocks of this stage are compiled in %s%s",
        len(blocks),
        len(reasons),
        "training" if stage.training else "evaluation",
        "".join(f"; {count} not: {reason}" for reason, count in skipped.items()),
    )
    return blocks


class _Block:
    """A module, and the same compiled."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._norms = [norm for norm in self._modules if isinstance(norm, BatchNormBase)]

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        # a code object of its own, as PyTorch limits recompilations per code object
        own = FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
        self._compiled = torch.compile(own, fullgraph=True, dynamic=False, options=OPTIONS)

    def has_hooks(self) -> bool:
        """Whether there are hooks other than those of `SliceStatistics`, which `run` calls."""
        return any(
            not isinstance(getattr(hook, "__self__", None), SliceStatistics)
            for module in self._modules
            for name in _HOOKS
            if name != "_forward_hooks_always_called"
            for hook in getattr(module, name).values()
        )

    @contextmanager
    def counted(self) -> Iterator[Counter[nn.Module]]:
        """Count calls of BatchNorm; those in a checkpoint, which repeats them, as two."""
        calls, outside = Counter[nn.Module](), top_saved_tensors_hooks(False)

        def count(norm: nn.Module, args: Any) -> None:
            calls[norm] += 1 + (top_saved_tensors_hooks(False) != outside)

        handles = [norm.register_forward_pre_hook(count) for norm in self._norms]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    def reason(
        self, stage: Stage, recording: Recording, step: Step, calls: Counter[nn.Module]
    ) -> str:
        """Why it cannot be compiled; empty if it can."""
        prefix, updated = f"{step.call}.", set[int]()
        for norm in self._norms:
            if norm.training:
                if norm.momentum is None or not is_plain(norm):
                    return "BatchNorm with a cumulative average, or a custom forward"
                if StatisticsOver.comm is not None:
                    return "BatchNorm over replicas communicates"
                if calls[norm] != 1:
                    return "it does not call each BatchNorm once, or in torch.utils.checkpoint"
                updated.update(map(id, norm.buffers()))
        state = {
            **dict(stage.named_parameters(remove_duplicate=False)),
            **dict(stage.named_buffers(remove_duplicate=False)),
        }
        written = (state[name] for name in recording.written_state if name.startswith(prefix))
        reasons = {
            "it disables gradients, or returns more than tensors": (
                not step.with_grad or step.non_tensors
            ),
            "it changes its attributes": any(
                f"{key.path}.".startswith(prefix) for key in stage._network.kept
            ),
            "it has hooks": self.has_hooks(),
            "it draws random numbers": step.call in recording.drawing,
            "it writes into buffers or weights": any(id(one) not in updated for one in written),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def run(
        self, stage: Stage, step: Step, values: dict[Value, Tensor], device: torch.device
    ) -> None:
        """Run it compiled and add its outputs to `values`.

        Raises:
            ValueError: if it cannot be captured as one graph.
        """
        from spatialdl.torch_internals import FailOnRecompileLimitHit, TorchDynamoException

        with ExitStack() as stack:
            for norm in self._norms:
                stack.enter_context(_hooks_around(norm))
            # function modes already saw the first run
            stack.enter_context(DisableTorchFunction())
            try:
                run_step(step, stage, values, device, self._compiled)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(
                    f"trainer.compile=true cannot compile '{step.name}': {reason}; leave it out"
                ) from error


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
