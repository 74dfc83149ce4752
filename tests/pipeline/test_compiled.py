"""Which steps are compiled, and how they are called; tests/mpi compares the results."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.compiled import check_compiler
from spatialdl.pipeline.layout_checks import check_compilable
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch

SIZE = (3, 11, 9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x))) + x


class Averaging(Block):
    """Keeps a moving average of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return super().forward(x)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Spare(Block):
    """Has a norm that is not called, whose statistics became zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.BatchNorm2d(4)


class Again(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Random(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.4, self.training)


def hooked() -> Block:
    block = Block()
    block.conv.register_forward_hook(lambda module, args, output: output * 1.5)
    return block


def cumulative() -> Block:
    block = Block()
    block.norm.momentum = None
    return block


class Network(nn.Module):
    """Two blocks around another one; a part that does not learn, and tanh in place."""

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2).requires_grad_(False)
        self.blocks = nn.Sequential(Block(), middle(), Block())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).tanh_()).mean((2, 3)))


def trained(network: nn.Module, compiled: bool, microbatches: int = 2) -> tuple[list, dict]:
    """Losses and outputs of three steps, and the state that they leave."""
    placement = Placement(1, ((1, 1),))
    pipeline = PipelineRuntime(
        *(
            network.double(),
            placement,
            make_schedule("gpipe", placement, microbatches),
            SingleProcess(),
        ),
        *(F.cross_entropy, SIZE, PipelineOptions(seed=3, compiled=compiled)),
    )
    optimizer = torch.optim.SGD([p for p in pipeline.parameters() if p.requires_grad], 0.1)
    draw, found = torch.Generator().manual_seed(0), []
    for step in range(4):
        parts = []
        for number in range(microbatches):
            samples = 2 + (number == 0 and step == 2)
            images = torch.randn(samples, *SIZE, generator=draw, dtype=torch.float64)
            target = torch.randint(3, (samples,), generator=draw)
            parts.append(Microbatch(samples, 1 / microbatches, images, target))
        found.append(pipeline.train_step(parts, step))
        optimizer.step()
        found += [float(y.square().sum()) for y in pipeline.evaluate(parts).values()]
    return found, pipeline.state_dict()


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The calls of what is compiled, which stays as it is here."""
    found: list[int] = []

    def fake(function, **options):
        assert options.pop("fullgraph") is True

        def run(*args):
            found.append(len(args))
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", fake)
    return found


MIDDLES = {
    "a block": (Block, ""),
    "a buffer": (Averaging, "it writes into buffers or weights"),
    "a norm twice": (Twice, "it does not call each BatchNorm once"),
    "a norm never": (Spare, "it does not call each BatchNorm once"),
    "a checkpoint": (Again, "it does not call each BatchNorm once, or in torch.utils.checkpoint"),
    "random": (Random, "it draws random numbers"),
    "hooks": (hooked, "it has hooks"),
    "cumulative": (cumulative, "BatchNorm with a cumulative average"),
}


@pytest.mark.parametrize("number", range(len(MIDDLES)), ids=list(MIDDLES))
def test_what_cannot_be_compiled_stays_as_it_is(number, calls, caplog):
    middle, reason = list(MIDDLES.values())[number]
    microbatches = 2 - number % 2
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO):
        ours, left = trained(Network(middle), True, microbatches)
    assert calls
    torch.manual_seed(1)
    plain, expected = trained(Network(middle), False, microbatches)
    assert ours == plain
    assert left.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(left[key], value), key
    told = [one.message for one in caplog.records if "in training" in one.message]
    assert told
    if reason:
        assert f"2 of 3 blocks of this stage are compiled in training; 1 not: {reason}" in told[0]
    else:
        assert told[0].endswith("3 of 3 blocks of this stage are compiled in training")


def test_hooks_for_a_while_are_called(calls, monkeypatch):
    """As those that look for NaN, which PyTorch would not see."""
    seen = []
    real = PipelineRuntime.train_step

    def hooked(pipeline, parts, step):
        conv = pipeline.stages[0].blocks.get_submodule("0.conv")
        handle = conv.register_forward_hook(lambda *given: seen.append(step))
        if step != 1:
            handle.remove()
        loss = real(pipeline, parts, step)
        handle.remove()
        return loss

    monkeypatch.setattr(PipelineRuntime, "train_step", hooked)
    trained(Network(Block), True)
    assert seen == [1, 1]
    assert calls


def test_attributes_that_change_are_constants_no_longer(calls, monkeypatch):
    class Scaled(Network):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.factor)

    real, found = PipelineRuntime.train_step, []

    def changed(pipeline, parts, step):
        network.factor = 1.0 + (step > 1)
        return real(pipeline, parts, step)

    monkeypatch.setattr(PipelineRuntime, "train_step", changed)
    for compiled in (True, False):
        torch.manual_seed(1)
        network = Scaled(Block)
        network.factor = 1.0
        found.append(trained(network, compiled)[0])
    assert found[0] == found[1]


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Drawing(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), Breaking(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            "cannot compile '1': ",
        ),
        (Drawing(Block), "cannot compile blocks of Drawing: .*'dropout' outside"),
        (nn.Sequential(nn.Flatten(), nn.Linear(297, 3)), "no Sequential or ModuleList has mod"),
    ],
)
def test_networks_that_cannot_be_compiled_are_refused(network, message):
    with pytest.raises(ValueError, match=rf"trainer\.compile=true .*{message}.*leave it out"):
        trained(network, True)


def test_a_missing_compiler_and_unknown_devices_are_refused_before_training():
    check_compiler(torch.device("cpu"))
    from torch._inductor import config

    # not by monkeypatch: it gives the value back by an attribute, of which inductor hides the key
    missing = config.patch({"cpp.cxx": ("no_such_compiler",)})
    with missing, pytest.raises(ValueError, match=r"needs a C\+\+ compiler .*install g\+\+"):
        check_compiler(torch.device("cpu"))
    with pytest.raises(ValueError, match="inductor does not support meta: leave it out"):
        check_compiler(torch.device("meta"))


# --- layout checks


ONE = ((1, 1),)


@pytest.mark.parametrize(
    ("placement", "settings", "message"),
    [
        (Placement(1, ((2, 1),)), ("none", False), r"parallel\.grid=\[2, 1\], .*take par"),
        (Placement(1, ONE * 2, 1, False, (1, 2)), ("none", False), "local_dp=2, .*take"),
        (Placement(1, ONE, tensor=(2,)), ("none", False), "tensor=2, .*take"),
        (Placement(1, ONE), ("block", False), "recompute=block, as .*leave one"),
        (Placement(2, ONE), ("none", True), "shard_state=true, as FSDP2"),
        (Placement(1, ONE), ("none", False, 60), r"comm\.timeout=60, as ranks .* at least 600"),
        (Placement(1, ONE), ("none", False, None, True), "deterministic=true, as the first step"),
    ],
)
def test_layouts_and_settings_that_cannot_be_compiled_are_refused(placement, settings, message):
    for timeout in (None, 0, 600):
        check_compilable(Placement(2, ONE * 4, 2), "none", False, timeout)
    with pytest.raises(
        ValueError, match=rf"trainer\.compile=true cannot be combined with .*{message}"
    ):
        check_compilable(placement, *settings)
