"""Layers with weights on divided channels.

A weight is divided along its output channels: each rank reads all input channels and computes some
of the output channels (filter parallelism, Dryden et al., "Channel and filter parallelism for
large-scale CNN training", SC 2019; the column parallel layers of Shoeybi et al., "Megatron-LM",
2019). Or it is divided along its input channels: each rank reads some of them, and partial sums are
reduced (channel parallelism, row parallel layers). Grouped layers are divided by groups, and
per-channel layers follow their input: neither communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.layout.partition import Partition
from spatialdl.spatial.autocast import in_float32
from spatialdl.spatial.channels.moves import all_gather, local_part, sum_and_divide, sum_parts
from spatialdl.spatial.channels.tensor import (
    ChannelTensor,
    all_channels,
    all_channels_for_parts,
    channel_op,
    divided_op,
    is_divided,
    local_channels,
    on_tile,
)
from spatialdl.spatial.layer_norm import standardize_over
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.random.composite import by_name
from spatialdl.spatial.span import ReductionSpan


def comm_of(*operands: Any) -> Communicator:
    """The communicator of the first `ChannelTensor`."""
    return next(one.comm for one in operands if isinstance(one, ChannelTensor))


def _partition_of(x: Any, at: int) -> Partition | None:
    """The partition of a dim; None if it is whole."""
    return x.partition if is_divided(x) and x.at == at else None


Local = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Layer:
    """A layer with a weight that has dims of output and of input channels.

    Args:
        local: the layer on plain tensors, of (x, weight, bias).
        x, weight, bias: its operands, whole or divided.
        at: the channel dim of `x` and of the result.
        out, into: the output and input channel dims of the weight.
    """

    def __init__(
        self,
        local: Local,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        at: int,
        out: int,
        into: int,
    ) -> None:
        self._local, self._x, self._weight, self._bias = local, x, weight, bias
        self._at, self._out, self._into = at, out, into
        self._comm = comm_of(x, weight, bias)

    def run(self) -> Tensor:
        of_outputs = _partition_of(self._weight, self._out)
        of_inputs = _partition_of(self._weight, self._into)
        if isinstance(self._weight, ChannelTensor) and self._weight.is_open:
            of_outputs, of_inputs = self._choice()
        if of_outputs is not None:
            return self._by_outputs(of_outputs)
        if of_inputs is not None:
            return self._by_inputs(of_inputs)
        return self._local(
            all_channels(self._x), all_channels(self._weight), all_channels(self._bias)
        )

    def _choice(self) -> tuple[Partition | None, Partition | None]:
        """The partition by outputs or by inputs that sends less, for an undecided weight."""
        ranks = self._comm.size
        outputs, inputs = self._weight.shape[self._out], self._weight.shape[self._into]
        by_outputs = Partition.even(outputs, ranks) if outputs >= ranks else None
        by_inputs = _partition_of(self._x, self._at)
        if by_inputs is None and inputs >= ranks:
            by_inputs = Partition.even(inputs, ranks)
        form = self._weight.form if isinstance(self._weight, ChannelTensor) else None
        if form is not None:
            planned = by_outputs if form == "output" else by_inputs
            if planned is None:
                raise ValueError(
                    f"tensor_plan divides a layer with {inputs} inputs and {outputs} outputs by "
                    f"its {form}s, which are fewer than {ranks} ranks: use replicate for it"
                )
            return (by_outputs, None) if form == "output" else (None, by_inputs)
        if by_outputs is None or by_inputs is None:
            return by_outputs, None if by_outputs is not None else by_inputs
        if not is_divided(self._x):
            return by_outputs, None  # communicates in backward only
        result = meta_result(self._local, self._x, self._weight, None)
        is_larger = self._x.numel() > result.numel()
        return (None, by_inputs) if is_larger else (by_outputs, None)

    def _by_outputs(self, partition: Partition) -> Tensor:
        x = all_channels_for_parts(self._x, self._comm)
        weight = local_channels(self._weight, self._out, partition, self._comm)
        bias = self._bias
        if bias is not None:
            bias = local_channels(bias, 0, partition, self._comm)
        result = ChannelTensor(self._local(x, weight, bias), self._at, partition, self._comm)
        result.origin = self._weight if isinstance(self._weight, ChannelTensor) else None
        return result

    def _by_inputs(self, partition: Partition) -> Tensor:
        x = local_channels(self._x, self._at, partition, self._comm)
        weight = local_channels(self._weight, self._into, partition, self._comm)
        parts = self._local(x, weight, None)
        outputs, comm, bias = self._weight.shape[self._out], self._comm, self._bias
        shape = [1] * parts.dim()
        shape[self._at] = -1
        if outputs < comm.size:
            whole = on_tile(lambda tile: sum_parts(tile, comm), parts)
            if bias is not None:
                whole = whole + all_channels(bias).view(shape).to(whole.dtype)
            return whole.to(parts.dtype)  # rounded once, as by one kernel
        own = Partition.even(outputs, comm.size)
        result = on_tile(lambda tile: sum_and_divide(tile, self._at, own, comm), parts)
        if bias is not None:
            result = result + local_channels(bias, 0, own, comm).view(shape).to(result.dtype)
        return ChannelTensor(result.to(parts.dtype), self._at, own, comm)


def _by_groups(
    local: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    outputs: int,
) -> Any:
    """A grouped layer divided by groups: each rank has all channels of its groups."""
    comm = comm_of(x, weight, bias)
    if groups < comm.size or not (is_divided(x) or isinstance(weight, ChannelTensor)):
        return NotImplemented
    of_inputs = Partition.even(x.shape[1], comm.size, x.shape[1] // groups)
    of_outputs = Partition.even(outputs, comm.size, outputs // groups)
    of_weight = Partition.even(weight.shape[0], comm.size, weight.shape[0] // groups)
    held = of_inputs.size_of(comm.rank) * groups // x.shape[1]
    result = local(
        local_channels(x, 1, of_inputs, comm),
        local_channels(weight, 0, of_weight, comm),
        None if bias is None else local_channels(bias, 0, of_outputs, comm),
        held,
    )
    return ChannelTensor(result, 1, of_outputs, comm)


def _register_conv(function: Any, out: int, names: str) -> None:
    """Register a convolution.

    Args:
        out: the dim of the weight's output channels, if it has one group.
        names: of the arguments after the bias.
    """

    @channel_op(function)
    def conv(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        given = by_name(names.split(), args, kwargs)
        groups = given.pop("groups", 1)

        def local(x: Tensor, w: Tensor, b: Tensor | None, groups: int = 1) -> Tensor:
            y: Tensor = function(x, w, b, groups=groups, **given)
            return y

        if input.dim() < weight.dim():
            return NotImplemented  # without samples
        if groups > 1:
            outputs = weight.shape[out] * (groups if out else 1)
            return _by_groups(local, input, weight, bias, groups, outputs)
        return Layer(local, input, weight, bias, at=1, out=out, into=1 - out).run()


_TRANSPOSED = "stride padding output_padding groups dilation"
for _dims in (1, 2, 3):
    _register_conv(getattr(torch, f"conv{_dims}d"), 0, "stride padding dilation groups")
    _register_conv(getattr(torch, f"conv_transpose{_dims}d"), 1, _TRANSPOSED)


@channel_op(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or (is_divided(input) and input.at != input.dim() - 1):
        return NotImplemented
    return Layer(F.linear, input, weight, bias, at=input.dim() - 1, out=0, into=1).run()


@channel_op(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    # max_norm needs whole rows.
    if isinstance(input, ChannelTensor) or max_norm is not None or sparse:
        return NotImplemented
    assert isinstance(weight, ChannelTensor)
    comm, channels = weight.comm, weight.shape[1]
    own = _partition_of(weight, 1)
    if own is None and weight.is_open and channels >= comm.size:
        own = Partition.even(channels, comm.size)
    if own is None:
        return NotImplemented
    part = local_channels(weight, 1, own, comm)
    output = F.embedding(input, part, padding_idx, None, norm_type, scale_grad_by_freq)
    result = ChannelTensor(output, input.dim(), own, comm)
    result.origin = weight
    return result


@channel_op(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    state = (running_mean, running_var, weight, bias)
    return _normalize(F.batch_norm, input, state, training, momentum, eps)


@channel_op(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    state = (running_mean, running_var, weight, bias)
    return _normalize(F.instance_norm, input, state, use_input_stats, momentum, eps)


def _normalize(
    function: Any,
    input: Tensor,
    state: Sequence[Tensor | None],
    updates: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """A norm per channel; the first two of `state` are running statistics, updated in place."""
    comm = comm_of(input, *state)
    partition = None
    if is_divided(input) and input.at == 1:
        partition = input.partition
        own = _local_state(state, partition, comm)
        result: Tensor = input.like(function(input.part, *own, updates, momentum, eps))
    else:
        own = [all_channels(one) for one in state]
        result = function(all_channels(input), *own, updates, momentum, eps)
    for buffer, used in zip(state[:2], own[:2], strict=True):
        if updates and buffer is not None and used is not None:
            _write_back(buffer, used, partition, comm)
    return result


@torch.no_grad()
def _write_back(
    buffer: Tensor, used: Tensor, partition: Partition | None, comm: Communicator
) -> None:
    """Write back statistics updated in a copy, if the buffer is not divided as the input is."""
    held = buffer.part if isinstance(buffer, ChannelTensor) else buffer
    if held is used:
        return
    whole = used if partition is None else all_gather(used, 0, partition, comm)
    if is_divided(buffer):
        whole = local_part(whole, buffer.at, buffer.partition, comm.rank)
    held.copy_(whole)


@divided_op(F.prelu, torch.prelu)
def prelu(input: ChannelTensor, weight: Tensor) -> Any:
    if input.at != 1:
        return NotImplemented
    if weight.numel() == 1:
        return input.like(torch.prelu(input.part, all_channels_for_parts(weight, input.comm)))
    return input.like(
        torch.prelu(input.part, local_channels(weight, 0, input.partition, input.comm))
    )


def _local_state(
    state: Sequence[Tensor | None], partition: Partition, comm: Communicator
) -> list[Tensor | None]:
    """This rank's channels of 1D weights and buffers."""
    return [None if one is None else local_channels(one, 0, partition, comm) for one in state]


@divided_op(F.layer_norm)
def layer_norm(
    input: ChannelTensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """LayerNorm over the divided dim, with statistics combined over the ranks."""
    if len(normalized_shape) > 1 or input.at < input.dim() - 1:
        return NotImplemented
    span = ReductionSpan((input.at,), input.shape[input.at], True, (), input.comm)
    weight, bias = _local_state((weight, bias), input.partition, input.comm)

    def normalize(tile: Tensor) -> Tensor:
        y = standardize_over(in_float32(tile), span, eps)
        y = y if weight is None else y * weight.to(y.dtype)
        return y if bias is None else y + bias.to(y.dtype)

    return input.like(on_tile(normalize, input.part))


@divided_op(F.group_norm, torch.group_norm)
def group_norm(
    input: ChannelTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # torch.group_norm only
) -> Any:
    """GroupNorm of whole groups on each rank; else of all channels."""
    if input.at != 1:
        return NotImplemented
    meta_result(F.group_norm, input, num_groups)  # raises PyTorch's errors on all ranks
    size, partition = input.shape[1] // num_groups, input.partition
    held = [partition.size_of(rank) for rank in range(partition.ranks)]
    cuts = (bound for bounds in partition.pieces for bound in bounds)
    if min(held) == 0 or any(cut % size for cut in cuts):
        input.request(unit=size)
        return NotImplemented
    weight, bias = _local_state((weight, bias), partition, input.comm)
    groups = held[input.comm.rank] // size
    return input.like(F.group_norm(input.part, groups, weight, bias, eps))
