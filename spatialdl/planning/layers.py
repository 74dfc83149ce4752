"""The layers of a network whose costs are told apart, and between which it may be cut."""

from __future__ import annotations

from torch import nn

from spatialdl.pipeline.recording import CannotRecord, Forward
from spatialdl.pipeline.stage import SAMPLES, is_chain
from spatialdl.pipeline.steps import Recording

Layer = tuple[str, nn.Module]


def layers_of(
    model: nn.Module, image: tuple[int, int, int]
) -> tuple[list[Layer], Recording | None]:
    """The layers of a chain, in order; any other network counts as one layer.

    Args:
        image: (channels, H, W).

    Returns:
        The layers, and what the network does if it is a chain.
    """
    try:
        recording = Forward(model, image).of(SAMPLES, training=False)
    except CannotRecord:
        return [("", model)], None
    if not is_chain(recording):
        return [("", model)], None
    paths = [str(step.call) for step in recording.steps]
    return [(path, model.get_submodule(path)) for path in paths], recording
