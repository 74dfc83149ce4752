from __future__ import annotations

import numpy as np
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.features.maps.components import components_of
from spatialdl.predicting.pieces import MapPiece


def pieces_of(values: torch.Tensor) -> list[MapPiece]:
    return [MapPiece((0, 0), values[:, :3]), MapPiece((3, 0), values[:, 3:])]


def test_components_are_those_of_all_cells():
    values = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0))
    values[2] = 4 * values[0] + 100
    found = components_of(pieces_of(values), 6, SingleProcess())
    cells = values.double().flatten(1).T.numpy()
    centred = cells - cells.mean(0)
    _, singular, directions = np.linalg.svd(centred)
    np.testing.assert_allclose(found.parts, (singular**2 / (singular**2).sum())[:3], atol=1e-12)
    signs = np.sign((found.directions.numpy() * directions[:3]).sum(1, keepdims=True))
    np.testing.assert_allclose(found.directions, signs * directions[:3], atol=1e-9)
    assert (found.directions.gather(1, found.directions.abs().argmax(1, keepdim=True)) > 0).all()
    projected = centred @ found.directions.numpy().T
    for piece in pieces_of(values):
        first, rows = piece.start[0], piece.values.shape[1]
        wanted = projected.T.reshape(3, 7, 5)[:, first : first + rows]
        np.testing.assert_allclose(found.of(piece).values, wanted, atol=1e-5)


def test_few_features_and_equal_cells_have_components():
    found = components_of([MapPiece((0, 0), torch.ones(2, 3, 3))], 2, SingleProcess())
    assert found.directions.shape == (2, 2)
    assert found.parts.tolist() == [0, 0]
    assert not found.of(MapPiece((0, 0), torch.ones(2, 3, 3))).values.any()
