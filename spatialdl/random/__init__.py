"""Random numbers that are the same picture in every layout.

A number is a function of (seed, step, micro-batch, number of the call, place in the whole tensor),
and of nothing else: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", 2014), whose state of place i is simply ``key + i * gamma``. So a rank draws the
numbers of its own pixels alone, and PyTorch's default generator is never touched.

    with spatialdl.random.keyed(seed, step, microbatch):
        loss = model(images)

makes dropout, ``torch.rand``, ``torch.randn`` and ``bernoulli`` draw so, on split images and on
plain tensors alike: one process and any number of ranks drop the same pixels, channels, paths.
Outside of it only split images draw so, with the seed of rank 0 and a running number of calls.

What runs again in backward must draw the same numbers again:

    torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=spatialdl.random.checkpoint_contexts
    )

Without `checkpoint_contexts` a mask that would be drawn again in backward raises an error.
"""

from spatialdl.random.drawing import checkpoint_contexts, keyed
from spatialdl.random.streams import scope

__all__ = ["checkpoint_contexts", "keyed", "scope"]
