"""gather_before: a module gets whole images, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl import SpatialTensor, average_gradients, gather_before, shard
from tests.mpi.equality import close, meshes  # noqa: F401


class Vgg(nn.Module):
    """Flattens its map in a forward of its own; two inputs of the head come by name."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return self.head(y, skip=y.sigmoid())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * 7 * 5, 3)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        assert not isinstance(x, SpatialTensor)
        assert not isinstance(skip, SpatialTensor)
        return self.linear((x * skip).view(len(x), -1))


def network() -> Vgg:
    torch.manual_seed(0)
    return Vgg().double()


def test_a_head_that_flattens_equals_one_process(meshes: dict) -> None:  # noqa: F811
    plain, image = network(), torch.rand(2, 3, 13, 9, dtype=torch.float64)
    expected = image.clone().requires_grad_()
    loss = plain(expected).square().sum()
    loss.backward()
    for mesh in meshes.values():
        model, ours = network(), image.clone().requires_grad_()
        gather_before(model, "head")
        found = model(shard(ours, mesh)).square().sum()
        found.backward()
        average_gradients(model, mesh)
        close(found, loss, f"loss on {mesh.grid} ")
        close(ours.grad, expected.grad, f"gradient of the image on {mesh.grid} ")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, f"{name} on {mesh.grid} ")


def test_whole_images_pass_as_they_are(meshes: dict) -> None:  # noqa: F811
    model = network()
    image = torch.rand(2, 3, 13, 9, dtype=torch.float64)
    expected = model(image)
    gather_before(model, ["head"])
    assert torch.equal(model(image), expected)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("haed", r"Vgg has no module 'haed'; similar names: head"),
        ("conv", r"has no module 'conv'"),
        ("features.9", r"similar names: .*features\.0"),
        ("linear", r"similar names: .*head\.linear"),
        ("", r"its modules: features, head"),
    ],
)
def test_an_unknown_name_is_told_with_those_near_it(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        gather_before(network(), name)
