"""Encoders of timm: `timm:NAME`, also `timm:hf-hub:OWNER/NAME` and `timm:local-dir:FOLDER`."""

from __future__ import annotations

from contextlib import nullcontext

from spatialdl.features.encoders.encoder import Encoder, Features, Wish
from spatialdl.features.encoders.maps import TimmMap
from spatialdl.features.encoders.offline import offline
from spatialdl.features.encoders.preprocessing import Preprocessing, centred
from spatialdl.features.encoders.weights import load_file


def timm_encoder(wish: Wish) -> Encoder:
    """The network without its classifier, and the pre-processing of its configuration.

    Raises:
        ValueError: timm is missing or knows no such network, or its weights are not here.
    """
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise ValueError(
            f"--encoder {wish.name} needs timm ({error}): pip install 'spatialdl[features]'"
        ) from error
    pretrained = wish.weights is None
    try:
        with nullcontext() if wish.download else offline():
            network = timm.create_model(
                wish.rest, pretrained=pretrained, **{"num_classes": 0, **wish.arguments}
            )
    except Exception as error:  # what hubs and networks raise is anything
        raise ValueError(_why(wish, error)) from error
    if wish.weights is not None:
        load_file(network, wish.weights)
    config = timm.data.resolve_data_config({}, model=network)
    size, part = int(config["input_size"][-1]), float(config["crop_pct"])
    if config["input_size"][-2] != size:
        raise ValueError(
            f"--encoder {wish.name} takes images of {config['input_size'][-2]} x {size}, tiles are "
            "squares: say --input-size"
        )
    resized = int(size / part)  # as timm rounds it
    found = Preprocessing(
        size,
        tuple(map(float, config["mean"])),
        tuple(map(float, config["std"])),
        wish.interpolation or str(config["interpolation"]),
        resized if resized > size else None,
        centred(resized, size),
    )
    source = str(wish.weights or f"pretrained {wish.rest}")
    found_by = TimmMap(network) if wish.whole else Features(network)
    return Encoder(found_by, wish.preprocessing(found), source)


def _why(wish: Wish, error: Exception) -> str:
    said = f"--encoder {wish.name} cannot be made: {str(error).strip().partition(chr(10))[0]}"
    if wish.weights is not None or wish.download:
        return said
    name = wish.rest.removeprefix("hf-hub:").removeprefix("hf_hub:")
    repository = name if "/" in name else f"timm/{name}"
    return (
        f"{said}; nothing is downloaded: give --weights FILE, fetch them where there is a network "
        f"(hf download {repository}), or add --download"
    )
