"""Maps of a region split over ranks equal those of a single process, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import nn

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.inference.features.encoders.libraries import TimmMap, TransformersMap
from spatialdl.inference.features.maps.running import MapNetwork, RegionParts, grid_for
from spatialdl.inference.features.maps.writing import components_of
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.training.optimization.precision import precision_of
from tests.inference.features.maps.networks import Convolved, encoder_of, mapped, region_of
from tests.vision import need_timm

WORLD = MpiCommunicator(MPI.COMM_WORLD)
CPU = torch.device("cpu")


def vit_of_timm() -> nn.Module:
    need_timm()
    import timm

    return TimmMap(timm.create_model("test_vit", num_classes=0, dynamic_img_size=True))


def swin_of_timm() -> nn.Module:
    need_timm()
    import timm

    sizes = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "strict_img_size": False}
    return TimmMap(timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **sizes))


def vit_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=32, image_size=32, patch_size=8)
    return TransformersMap(transformers.ViTModel(config))


CASES = {
    "convolutions": (Convolved, (148, 92)),
    "no padding": (lambda: nn.Conv2d(3, 6, 9, 3), (75, 63)),
    "timm's vit": (vit_of_timm, (112, 80)),
    "timm's swin": (swin_of_timm, (88, 72)),
    "transformers' vit": (vit_of_transformers, (72, 56)),
}


def pieces_together(size: tuple[int, int], pieces: list[MapPiece]) -> torch.Tensor:
    found = [piece for one in WORLD.allgather(pieces) for piece in one]
    whole = found[0].values.new_full((len(found[0].values), *size), torch.nan)
    for piece in found:
        rows, columns = (
            slice(first, first + many)
            for first, many in zip(piece.start, piece.values.shape[1:], strict=True)
        )
        assert whole[:, rows, columns].isnan().all()  # no cell is on two ranks
        whole[:, rows, columns] = piece.values
    return whole


@pytest.mark.parametrize(("name", "turned"), [(name, at % 2) for at, name in enumerate(CASES)])
def test_a_split_region_has_the_map_of_one_process(name, turned, tmp_path):
    make, extent = CASES[name]
    torch.manual_seed(0)
    network = make()
    path = Path(WORLD.bcast(tmp_path)) / "a.tif"
    if WORLD.rank == 0:
        region_of(path, extent)
    WORLD.barrier()
    region = region_of(path, extent)
    wanted = mapped(network, region)
    grid = grid_for(WORLD.size)[:: -1 if turned else 1]
    split = MapNetwork(
        encoder_of(network), CPU, precision_of("float64", CPU), RegionParts(grid), WORLD
    )
    size, pieces = split.run(region)
    assert size == tuple(wanted.shape[1:])
    found = pieces_together(size, pieces)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    own = components_of(pieces, len(wanted), WORLD)
    whole = [MapPiece((0, 0), wanted)] if WORLD.rank == 0 else []
    torch.testing.assert_close(own.parts, components_of(whole, len(wanted), WORLD).parts)
