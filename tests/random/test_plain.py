"""Random functions of PyTorch, in what they compute."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from spatialdl.random import keyed


@pytest.mark.parametrize("training", [False, True])
def test_random_slopes_are_those_of_pytorch_at_zero_and_below(training: bool) -> None:
    """At zero PyTorch takes the slope of what is below; ours once took 1."""
    gradients = []
    for key in ((1, 2, 3), None):
        x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
        with keyed(*key) if key else nullcontext():
            F.rrelu(x * 1, 0.2, 0.2, training, inplace=True).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_dropout_keeps_the_mean_and_its_gradient_has_the_mask() -> None:
    x = torch.ones(8, 16, 40, 40, requires_grad=True)
    with keyed(0, 1):
        for p in (0.1, 0.5, 0.9):
            y = F.dropout(x, p)
            assert y.mean().item() == pytest.approx(1, abs=2e-2)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(grad, y.detach())
        y = F.alpha_dropout(torch.randn(200, 1000), 0.3)
        assert [y.mean().item(), y.std().item()] == pytest.approx([0, 1], abs=2e-2)
        mask = F.dropout2d(x)[:, :, :1, :1]
        assert torch.equal(F.dropout3d(x.detach())[:, :1, :1, :1] > -1, torch.ones(8, 1, 1, 1) > 0)
        assert set(mask.flatten().tolist()) == {0.0, 2.0}


def test_errors_of_pytorch_stay() -> None:
    with keyed(0, 0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(torch.ones(3), 2.0)
        assert F.dropout(torch.ones(3), training=False).tolist() == [1, 1, 1]
