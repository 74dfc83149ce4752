"""Encoders of timm: `timm:NAME`, also `timm:hf-hub:OWNER/NAME` and `timm:local-dir:FOLDER`."""

from __future__ import annotations

from contextlib import nullcontext

from spatialdl.features.encoders.encoder import Encoder, Features, Wish
from spatialdl.features.encoders.maps import TimmMap
from spatialdl.features.encoders.offline import offline
from spatialdl.features.encoders.preprocessing import Preprocessing, centred
from spatialdl.features.encoders.weights import load_file


def timm_encoder(wish: Wish) -> Encoder:
    """Make a timm network without its classifier, with the pre-processing of its configuration.

    Raises:
        ValueError: timm is missing or has no such network, or its weights are missing.
    """
    try:
        import timm
        import timm.data
    except (ImportError, RuntimeError) as error:  # also where timm and torchvision do not match
        raise ValueError(
            f"--encoder {wish.name} needs timm ({error}): pip install 'spatialdl[features]'"
        ) from error
    pretrained = wish.weights is None
    try:
        with nullcontext() if wish.download else offline():
            network = timm.create_model(
                wish.rest, pretrained=pretrained, **{"num_classes": 0, **wish.arguments}
            )
    except Exception as error:  # hubs and networks may raise anything
        raise ValueError(_why(wish, error)) from error
    if wish.weights is not None:
        load_file(network, wish.weights)
    config = timm.data.resolve_data_config({}, model=network)
    size, part = int(config["input_size"][-1]), float(config["crop_pct"])
    if config["input_size"][-2] != size:
        raise ValueError(
            f"--encoder {wish.name} takes images of {config['input_size'][-2]} x {size}, but tiles "
            "are square: add --input-size"
        )
    resized = int(size / part)  # rounded as in timm
    found = Preprocessing(
        size,
        tuple(map(float, config["mean"])),
        tuple(map(float, config["std"])),
        wish.interpolation or str(config["interpolation"]),
        resized if resized > size else None,
        centred(resized, size),
    )
    source = str(wish.weights or f"pretrained {wish.rest}")
    features = TimmMap(network) if wish.whole else Features(network)
    return Encoder(features, wish.preprocessing(found), source)


def _why(wish: Wish, error: Exception) -> str:
    reason = f"--encoder {wish.name} cannot be made: {str(error).strip().partition(chr(10))[0]}"
    if wish.weights is not None or wish.download:
        return reason
    name = wish.rest.removeprefix("hf-hub:").removeprefix("hf_hub:")
    repository = name if "/" in name else f"timm/{name}"
    return (
        f"{reason}; downloads are disabled: give --weights FILE, download them beforehand "
        f"(hf download {repository}), or add --download"
    )
