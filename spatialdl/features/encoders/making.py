"""Construction of encoders by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spatialdl.features.encoders.encoder import Encoder, Wish
from spatialdl.features.encoders.from_class import own_encoder
from spatialdl.features.encoders.from_timm import timm_encoder
from spatialdl.features.encoders.from_torchvision import torchvision_encoder
from spatialdl.features.encoders.from_transformers import transformers_encoder

_MAKERS: Mapping[str, Callable[[Wish], Encoder]] = {
    "timm": timm_encoder,
    "transformers": transformers_encoder,
    "torchvision": torchvision_encoder,
    "own": own_encoder,
}


def make_encoder(wish: Wish) -> Encoder:
    """Make an encoder on the CPU, in evaluation mode, without gradients.

    Raises:
        ValueError: the encoder cannot be made.
    """
    if wish.weights is not None and not wish.weights.is_file():
        raise ValueError(f"--weights {wish.weights}: there is no such file")
    if wish.pool != "auto" and wish.kind != "transformers":
        raise ValueError(
            f"--pool {wish.pool} needs --encoder transformers:..., not {wish.name}: leave it out"
        )
    if wish.pool != "auto" and wish.whole:
        raise ValueError(f"--pool {wish.pool} is for tiles, but --whole has maps: leave it out")
    encoder = _MAKERS[wish.kind](wish)
    encoder.network.float().eval().requires_grad_(False)
    return encoder
