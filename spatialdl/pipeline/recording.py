"""Records the forward of a network as a list of steps, by running it once without data.

A network runs on the ``meta`` device, where tensors have shapes but no memory. Its calls of
modules, and of functions between them, are recorded, so ordinary Python with loops and branches on
sizes becomes a list that can be cut anywhere. Sizes are part of a recording, so each number of
samples has its own.

Some modules stay whole: those of ``torch.nn``; blocks, which are the elements of a
``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``; modules with hooks; and modules whose
forward cannot be recorded.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.pipeline.python_state import AttributeKey, form_of, own_attributes
from spatialdl.pipeline.recorder import CallRecorder, CannotRecord
from spatialdl.pipeline.statistics import is_plain
from spatialdl.pipeline.steps import Recording
from spatialdl.spatial.meta import dtype_of, meta_copy
from spatialdl.torch_internals import BatchNormBase


class Forward:
    """The forward of a network, recorded for any number of samples.

    Args:
        model: not modified; a copy without memory is run.
        image_size: (channels, H, W).

    Attributes:
        kept: attributes that the forward changes from call to call.
    """

    def __init__(self, model: nn.Module, image_size: tuple[int, ...]) -> None:
        self._shadow, self._image_size = meta_copy(model), image_size
        for layer in self._shadow.modules():
            if isinstance(layer, BatchNormBase) and is_plain(layer):
                # in training it refuses a single value for each channel
                layer.forward = torch.clone  # type: ignore[method-assign]
        self._dtype = dtype_of(model)
        self._whole: set[str] = set()  # paths of modules whose forward cannot be recorded
        self._found: dict[tuple[int, bool], Recording] = {}
        self._first: Recording | None = None
        self._modules = {path: weakref.ref(module) for path, module in model.named_modules()}
        self._outside: dict[AttributeKey, Any] = {}  # forms of constants of the recordings
        self.kept: set[AttributeKey] = set()
        self._sets_modes = any(
            type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
            for module in self._shadow.modules()
        )

    def __deepcopy__(self, memo: object) -> Forward:
        return self

    def of(self, samples: int, training: bool) -> Recording:
        """Return the recording for `samples` samples.

        Raises:
            CannotRecord: with the reason; also if the steps depend on the number of samples.
        """
        key = samples, training
        if key not in self._found:
            recording = self._record(samples, training)
            self._first = self._first or recording
            _check_form(self._first, recording, samples, training)
            self._found[key] = recording
        return self._found[key]

    def set_modes(self, stage: nn.Module, training: bool) -> None:
        """Set modes and frozen weights of a part as ``train()`` of the whole network does.

        Networks override ``train()`` to keep some BatchNorm layers in evaluation mode; a part does
        not contain the modules with the override.

        Args:
            stage: modules and parameters of the network under the network's names.
        """
        if not self._sets_modes:
            return
        shadow = dict(self._shadow.named_parameters(remove_duplicate=False))
        own = dict(stage.named_parameters(remove_duplicate=False))
        for name in shadow.keys() & own.keys():
            shadow[name].requires_grad_(own[name].requires_grad)
        if training:
            self._shadow.train()
        else:
            self._shadow.eval()
        for name in shadow.keys() & own.keys():
            own[name].requires_grad_(shadow[name].requires_grad)
        modules = dict(self._shadow.named_modules(remove_duplicate=False))
        for name, module in stage.named_modules(remove_duplicate=False):
            module.training = modules[name].training

    def look_for_changes(self) -> None:
        """Drop the recordings if attributes that they contain were set from outside."""
        for key, form in self._outside.items():
            module = self._modules[key.path]()
            if module is None:
                continue
            now = form_of(vars(module).get(key.name))
            if now != form:
                value = copy.deepcopy(vars(module).get(key.name))
                vars(self._shadow.get_submodule(key.path))[key.name] = value
                self._outside[key] = now
                self._found.clear()

    def _record(self, samples: int, training: bool) -> Recording:
        """Record; the first time in a mode, repeat until the forward reaches a steady state."""
        self._shadow.train(training)
        for parameter in self._shadow.parameters():  # so that all of autograd is seen
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        for layer in self._shadow.modules():
            if isinstance(layer, BatchNormBase) and "forward" not in vars(layer):
                layer.eval()
        image = torch.empty(samples, *self._image_size, dtype=self._dtype, device="meta")
        recording, is_steady = self._run(image, settled=False)
        while not (is_steady and any(mode == training for _, mode in self._found)):
            before, whole = recording, len(self._whole)
            recording, _ = self._run(image, settled=True)
            if len(self._whole) == whole:
                _check_constants(before, recording)
                break
        return recording

    def _run(self, image: Tensor, *, settled: bool) -> tuple[Recording, bool]:
        """Record the forward once, and find out whether it has left Python state as it was."""
        while True:
            recorder = CallRecorder(self._shadow, self._whole)
            try:
                with _without_draws():
                    recording = recorder.record(image)
            except Exception as error:
                where = recorder.owners[-1]
                if where == "":
                    raise CannotRecord(str(error)) from error
                self._whole.add(where)  # it is called without recording its inside
                continue
            state = recorder.state
            self.kept |= state.changed() if settled else set()
            self._note_outside({"", *recorder.opened})
            lost = recorder.lost(settled=settled)
            if settled and state.outside and not lost:
                raise CannotRecord(
                    f"its forward depends on '{state.outside}', which changes from run to run "
                    "outside of its modules; keep it in a separate module"
                )
            if not lost:
                return recording, not (state.changed() or state.outside)
            self._whole |= {recorder.around(key) for key in sorted(lost)}

    def _note_outside(self, paths: Iterable[str]) -> None:
        for path in paths:
            module = self._modules[path]()
            for name, value in own_attributes(module).items() if module is not None else ():
                if name != "training":
                    self._outside.setdefault(AttributeKey(path, name), form_of(value))


@contextmanager
def _without_draws() -> Iterator[None]:
    """Check that Python and NumPy draw no random numbers, and restore their generators."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
        drawn = "Python's random" if random.getstate() != python else ""
        if drawn or form_of(np.random.get_state()) != form_of(numpy):
            raise CannotRecord(
                f"its forward draws random numbers by {drawn or 'NumPy'}: draw them by PyTorch"
            )
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _check_constants(before: Recording, after: Recording) -> None:
    """Check that two runs of the same forward pass the same constants."""
    for first, second in zip(before.steps, after.steps, strict=False):
        if first.form != second.form or first.constants != second.constants:
            where = f" ({first.where})" if first.where else ""
            raise CannotRecord(f"its forward differs from run to run, at '{first.name}'{where}")
    if len(before.steps) != len(after.steps) or before.output != after.output:
        raise CannotRecord("its forward differs from run to run")


def _check_form(first: Recording, other: Recording, samples: int, training: bool) -> None:
    for one, two in zip(first.steps, other.steps, strict=False):
        if one.form != two.form:
            break
    else:
        if len(first.steps) == len(other.steps) and first.output == other.output:
            return
        one = two = (first.steps or other.steps)[-1]
    raise CannotRecord(
        f"for {samples} samples in {'training' if training else 'evaluation'} its forward takes "
        f"another branch than before, at '{two.name}' instead of '{one.name}'"
    )
