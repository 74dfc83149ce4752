"""PyTorch's own operator database, `invocations.op_db`, which tests draw samples from."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations as invocations

# the import forbids it to the process, and other tests set up a training run
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

__all__ = ["invocations"]
