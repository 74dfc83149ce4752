"""Against the algorithms of the papers, restated in NumPy element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from spatialdl.training.optimization.layer_wise import LAMB, LARS, LayerWise

STEPS = 5
LR, DECAY, TRUST, EPS = 0.3, 0.05, 0.02, 1e-6


def start() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.normal(size=(4, 3)), draw.normal(size=(5,)), np.zeros((2, 2))]


def gradients(step: int) -> list[np.ndarray]:
    draw = np.random.default_rng(100 + step)
    grads = [draw.normal(size=(4, 3)), draw.normal(size=(5,)), draw.normal(size=(2, 2))]
    if step == 2:
        grads[0][:] = 0.0  # no gradient at all, in one step
    return grads


def ours(kind, **settings) -> list[np.ndarray]:
    parameters = [nn.Parameter(torch.from_numpy(value)) for value in start()]
    groups = [
        {"params": [parameters[0], parameters[2]]},
        {"params": [parameters[1]], "weight_decay": 0.0},
        {"params": []},
    ]
    optimizer = kind(groups, lr=LR, weight_decay=DECAY, **settings)
    for step in range(STEPS):
        for parameter, grad in zip(parameters, gradients(step), strict=True):
            parameter.grad = torch.from_numpy(grad)
        if step == 3:  # in the middle, as from a checkpoint
            state = optimizer.state_dict()
            optimizer = kind(groups, lr=1.0, **settings)
            optimizer.load_state_dict(state)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def lars(weight: np.ndarray, number: int, decay: float, momentum: float) -> np.ndarray:
    """Algorithm 1 of You et al. 2017."""
    velocity = np.zeros_like(weight)
    for step in range(STEPS):
        grad, rate = gradients(step)[number], LR
        norms = np.sqrt((weight**2).sum()), np.sqrt((grad**2).sum())
        if decay and min(norms) > 0:
            rate *= TRUST * norms[0] / (norms[1] + decay * norms[0] + 1e-8)
        velocity = momentum * velocity + rate * (grad + decay * weight)
        weight = weight - velocity
    return weight


def lamb(weight: np.ndarray, number: int, decay: float, betas: tuple[float, float]) -> np.ndarray:
    """Algorithm 2 of You et al. 2020."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, STEPS + 1):
        grad = gradients(step - 1)[number]
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        ratio = (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + EPS)
        whole = ratio + decay * weight
        norms = np.sqrt((weight**2).sum()), np.sqrt((whole**2).sum())
        length = norms[0] / norms[1] if decay and min(norms) > 0 else 1.0
        weight = weight - LR * length * whole
    return weight


@pytest.fixture(params=["one by one", "together"], autouse=True)
def _as_on_a_device(request, monkeypatch):
    """On a CPU parameters are stepped one by one."""
    if request.param == "together":
        monkeypatch.setattr(LayerWise, "_batches", lambda self, some: [some] if some else [])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_that_of_the_paper(momentum):
    found = ours(LARS, momentum=momentum, trust=TRUST)
    for number, value in enumerate(start()):
        expected = lars(value, number, 0.0 if number == 1 else DECAY, momentum)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_lamb_is_that_of_the_paper(betas):
    found = ours(LAMB, betas=betas, eps=EPS)
    for number, value in enumerate(start()):
        expected = lamb(value, number, 0.0 if number == 1 else DECAY, betas)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (LARS, {"lr": -1}),
        (LARS, {"momentum": 1.0}),
        (LARS, {"trust": float("nan")}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"eps": -1e-8}),
        (LAMB, {"weight_decay": -0.1}),
    ],
)
def test_numbers_out_of_range_are_refused(kind, keys):
    with pytest.raises(ValueError, match="must be at least 0"):
        kind([nn.Parameter(torch.ones(2))], **keys)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_closure_is_called_with_gradients(kind):
    weight = nn.Parameter(torch.ones(2, 2))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert kind([weight]).step(closure) == 4.0
    assert not torch.equal(weight, torch.ones(2, 2))
