"""The private names of PyTorch that this package uses.

They may change with any version of PyTorch. All are looked up when this module is imported, so a
version that lacks one is refused by its name, before anything is computed. Other modules import
them from here (`tests/test_house.py`). Names of the compiler are looked up on first use,
because its import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch._subclasses.fake_tensor
import torch.nn.utils.stateless
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import nn

OLDEST, NEWEST = "2.8", "2.15"
"""Versions of PyTorch with which the tests passed; see docs/first-network.md."""


def _missing(name: object) -> ImportError:
    return ImportError(
        f"PyTorch {torch.__version__} lacks a name that spatialdl uses ({name}): install PyTorch "
        f"{OLDEST} to {NEWEST}, which are known to work, or a newer spatialdl"
    )


@contextmanager
def _known_versions() -> Iterator[None]:
    """Name the versions known to work if a name is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _missing(error) from error


with _known_versions():
    # dispatch and autograd
    DisableTorchFunction = torch._C.DisableTorchFunction
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
    OpOverload = torch._ops.OpOverload
    OpOverloadPacket = torch._ops.OpOverloadPacket
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
    current_graph_task_id = torch._C._current_graph_task_id
    disable_current_modes = torch.utils._python_dispatch._disable_current_modes
    disable_dynamo = torch._compile._disable_dynamo
    disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl
    get_eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    is_any_autocast_enabled = torch._C._is_any_autocast_enabled
    is_tracing = torch._C._is_tracing
    len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    set_throw_on_mutable_data_ptr = torch._C._set_throw_on_mutable_data_ptr
    tensor_version = torch.Tensor._version
    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    will_engine_execute_node = torch._C._will_engine_execute_node

    # functions on trees of tensors, and on lists of them
    tree_flatten = torch.utils._pytree.tree_flatten
    tree_leaves = torch.utils._pytree.tree_leaves
    tree_map = torch.utils._pytree.tree_map
    tree_map_only = torch.utils._pytree.tree_map_only
    tree_unflatten = torch.utils._pytree.tree_unflatten
    foreach_add = torch._foreach_add
    foreach_add_ = torch._foreach_add_
    foreach_addcmul_ = torch._foreach_addcmul_
    foreach_copy_ = torch._foreach_copy_
    foreach_div = torch._foreach_div
    foreach_div_ = torch._foreach_div_
    foreach_lerp_ = torch._foreach_lerp_
    foreach_mul = torch._foreach_mul
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    foreach_sqrt_ = torch._foreach_sqrt_
    foreach_sub_ = torch._foreach_sub_

    # layers, and the functions that `torch.nn.functional` calls
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    DropoutBase = nn.modules.dropout._DropoutNd
    InstanceNormBase = nn.modules.instancenorm._InstanceNorm
    NormBase = nn.modules.batchnorm._NormBase
    nn_functions = torch._C._nn
    reparametrize_module = nn.utils.stateless._reparametrize_module

    # torch.distributed, which some builds for single boards lack
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        AllToAllOptions = torch._C._distributed_c10d.AllToAllOptions
        AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
        AllreduceCoalescedOptions = torch._C._distributed_c10d.AllreduceCoalescedOptions
        AllreduceOptions = torch._C._distributed_c10d.AllreduceOptions
        BarrierOptions = torch._C._distributed_c10d.BarrierOptions
        ProcessGroup = torch._C._distributed_c10d.ProcessGroup
        ReduceScatterOptions = torch._C._distributed_c10d.ReduceScatterOptions
        Work = torch._C._distributed_c10d.Work
        backend_plugins = torch.distributed.Backend._plugins
        default_store = distributed_c10d._get_default_store
        rendezvous_handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
        self_recording_backends: set[str] = getattr(  # since 2.15
            distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()
        )


_ATEN = """
    _conj _conj_physical _native_batch_norm_legit _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _to_copy
"""
_FUNCTIONS = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d binary_cross_entropy col2im cross_entropy_loss
    fractional_max_pool2d fractional_max_pool3d huber_loss im2col l1_loss max_pool2d_with_indices
    max_pool3d_with_indices max_unpool2d max_unpool3d mse_loss nll_loss_nd pad smooth_l1_loss
    soft_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
_MODULE = """
    _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
    _forward_pre_hooks _load_from_state_dict _modules _non_persistent_buffers_set _parameters
"""
_TENSOR = "_backward_hooks _base _is_view _post_accumulate_grad_hooks _version"

ATTRIBUTES: list[tuple[object, str]] = [
    (nn.Module(), _MODULE),
    (nn_functions, _FUNCTIONS),
    (torch.Tensor, _TENSOR),
    (torch.UntypedStorage, "_cdata"),
    (torch.ops.aten, _ATEN),
    (torch.ops.aten.add.Tensor, "_overloadpacket _schema"),
    (torch.utils.data.DataLoader(torch.utils.data.TensorDataset()), "_iterator"),
    (torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers"),
]
"""Objects of PyTorch, and those of their attributes that other modules use in place."""

if torch.distributed.is_available():
    _GROUP = "_end_coalescing _register_backend _set_default_backend _start_coalescing"
    ATTRIBUTES += [(ProcessGroup, _GROUP), (torch._C._distributed_c10d.Backend.Options, "_timeout")]

with _known_versions():
    for _owner, _names in ATTRIBUTES:
        for _name in _names.split():
            getattr(_owner, _name)


def import_compiler() -> None:
    """Import the compiler, as the first optimizer does."""
    import_module("torch._dynamo")


def group_names() -> Collection[str]:
    """Names of the groups that are registered with torch.distributed."""
    names: Collection[str] = distributed_c10d._world.pg_names.values()
    return names


@contextmanager
def naming_groups(named: Callable[[list[int]], str]) -> Iterator[None]:
    """Let new groups with local synchronization be named by their world ranks."""
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = named  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
