"""Layout-independent random numbers.

A number is a function of (seed, step, micro-batch, index of the call, position in the whole tensor)
only: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), whose
state at position i is ``key + i * gamma``. A rank therefore draws only the numbers of its own
pixels, and PyTorch's default generator is not used.

    with spatialdl.random.keyed(seed, step, microbatch):
        loss = model(images)

applies to dropout, ``torch.rand``, ``torch.randn`` and ``bernoulli``, on split images and on plain
tensors: one process and any number of ranks drop the same pixels, channels, paths. Outside of it
only split images use these numbers, with the seed of rank 0 and a running index of calls.

Recomputation in backward must draw the same numbers again:

    torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=spatialdl.random.checkpoint_contexts
    )

Without `checkpoint_contexts` drawing a mask again in backward raises an error.
"""

from spatialdl.spatial.random.drawing import checkpoint_contexts, keyed
from spatialdl.spatial.random.streams import scope

__all__ = ["checkpoint_contexts", "keyed", "scope"]
