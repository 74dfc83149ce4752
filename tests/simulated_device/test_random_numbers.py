"""Random numbers depend on the generator alone, not on when they are drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

DRAWS = {
    "rand": lambda: torch.rand(50, device="sim"),
    "randn": lambda: torch.randn(50, device="sim"),
    "randint": lambda: torch.randint(9, (50,), device="sim"),
    "randperm": lambda: torch.randperm(50, device="sim"),
    "rand_like": lambda: torch.rand_like(torch.empty(50, device="sim")),
    "bernoulli": lambda: torch.full((50,), 0.5, device="sim").bernoulli(),
    "normal": lambda: torch.empty(50, device="sim").normal_(2, 3),
    "uniform": lambda: torch.empty(50, device="sim").uniform_(-1, 1),
    "exponential": lambda: torch.empty(50, device="sim").exponential_(),
    "multinomial": lambda: torch.ones(50, device="sim").multinomial(20),
    "dropout": lambda: F.dropout(torch.ones(50, device="sim")),
    "dropout of channels": lambda: F.dropout2d(torch.ones(2, 50, 2, 2, device="sim")),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(50, device="sim"), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(50, device="sim"), training=True),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(50, device="sim")),
    "fresh weights": lambda: torch.nn.Linear(5, 10, device="sim").weight.detach() * 1,
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_gives_the_same_numbers(name):
    found = []
    for delay in (0, 500):
        torch.sim.set_delay(delay)
        torch.manual_seed(3)
        found += [DRAWS[name]().cpu() for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_states_are_kept_and_restored():
    states = torch.sim.get_rng_state_all()
    x = torch.rand(5, device="sim:1")
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(5, device="sim:1"), x)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        y = torch.rand(5, device="sim")
    assert torch.equal(torch.rand(5, device="sim"), y)


def test_generators():
    first, second = (torch.Generator("sim").manual_seed(5) for _ in range(2))
    x = torch.rand(5, device="sim", generator=first)
    assert torch.equal(torch.rand(5, device="sim", generator=second), x)
    assert first.initial_seed() == 5
    second.set_state(first.get_state())
    assert torch.equal(
        torch.rand(5, device="sim", generator=second), torch.rand(5, device="sim", generator=first)
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(5, device="sim", generator=torch.Generator())


def test_devices_are_seeded_together():
    torch.manual_seed(2**63 + 5)
    assert torch.sim.initial_seed() == 2**63 + 5
    x = torch.rand(5, device="sim:0")
    assert torch.equal(torch.rand(5, device="sim:1").cpu(), x.cpu())


def test_uniform_numbers_are_uniform():
    x = torch.rand(100_000, device="sim").cpu()
    assert abs(x.mean().item() - 0.5) < 0.01
    assert abs(x.std().item() - 12**-0.5) < 0.01
