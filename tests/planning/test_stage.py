"""Stages compared with arithmetic by hand: layers whose maps have 4, 16 and 6 channels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from spatialdl.comm.mesh import dry_mesh
from spatialdl.layout.placement import Placement
from spatialdl.models import unet
from spatialdl.pipeline.own_tile import enter
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import HandoverShapes
from spatialdl.pipeline.stage import OUTPUT
from spatialdl.pipeline.steps import IMAGE
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.job import CannotWork, PlannedJob
from spatialdl.planning.preflight import dry_loss
from spatialdl.planning.stage import stage_costs
from spatialdl.spatial.meta import meta_copy
from spatialdl.spatial.random import keyed
from spatialdl.spatial.streaming.ledger import Ledger
from tests.planning.conftest import Writing, planned

ONE = (1, 1)
PIXELS = 10 * 7
HEAD = 2 * 4 * (6 + 6 + 5 + 5)
"""Bytes of what comes after the last map, at most."""


def maps(channels, samples=4):
    """Bytes."""
    return 4 * samples * channels * PIXELS


def convolution(before, after, samples=4):
    """Seconds of a convolution with 1 x 1 weights."""
    return 2 * samples * PIXELS * before * after / 1e9


def weights(*convolutions):
    return sum(4 * before * after for before, after in convolutions)


def chain(*layers):
    return planned(nn.Sequential(*layers), (3, 10, 7), 8)


@pytest.fixture
def three() -> PlannedJob:
    """Two of these layers are a stage, then one, then the rest."""
    made = chain(
        *(nn.Conv2d(3, 4, 1, bias=False), nn.Tanh()),
        nn.Conv2d(4, 16, 1, bias=False),
        *(nn.Tanh(), nn.Conv2d(16, 6, 1, bias=False), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5, bias=False)),
    )
    return replace(made, names=("2", "3"))


OWN = (weights((3, 4)), weights((4, 16)), weights((16, 6), (6, 5)))


def test_what_stages_hold_and_pass_on(three, paper):
    first, second, third = stage_costs(three, paper, Placement(1, (ONE,) * 3), 2, "none")
    assert [one.layers for one in (first, second, third)] == [(0, 2), (2, 3), (3, 9)]
    assert [one.weights for one in (first, second, third)] == [*OWN]
    assert [one.input for one in (first, second, third)] == [maps(3), maps(4), maps(16)]
    assert first.held == maps(4)  # the images are counted elsewhere
    assert second.held == maps(4) + maps(16)
    assert 2 * maps(16) + maps(6) < third.held <= 2 * maps(16) + maps(6) + 4 * HEAD
    assert [one.arriving[0] for one in (first, second, third)] == [0, maps(4), maps(16)]
    assert [one.arriving[1] for one in (first, second, third)] == [2 * maps(4), 2 * maps(16), 0]
    assert [one.sent for one in (first, second, third)] == [
        *(maps(4), maps(4) + maps(16), maps(16)),
    ]


def test_weights_of_later_layers_have_gradients_before(three, paper):
    """Most lives in the backward of tanh behind 16 channels: its output and two gradients."""
    (whole,) = stage_costs(three, paper, Placement(1, (ONE,)), 2, "none")
    loss = 2 * 4 + 4 * 4 * 5  # and its gradient, and the output, which is held meanwhile
    assert whole.first_backward_peak == maps(4) + 3 * maps(16) + loss + OWN[2]
    assert whole.backward_peak == maps(4) + 3 * maps(16) + loss + sum(OWN)


def test_stages_that_run_again_hold_what_enters_and_what_they_give(three, paper):
    once = stage_costs(three, paper, Placement(1, (ONE,) * 3), 2, "none")
    again = stage_costs(three, paper, Placement(1, (ONE,) * 3), 2, "stage")
    assert [one.held for one in again] == [maps(4), maps(4) + maps(16), maps(16) + 4 * 4 * 5]
    for one, two in zip(once, again, strict=True):
        assert two.backward == pytest.approx(one.backward + one.forward)


def test_whoever_receives_takes_the_time_of_messages(three, figures):
    """The first two ranks share a node."""
    cluster = cluster_of(figures | {"ranks_per_node": 2})
    first, second, third = stage_costs(three, cluster, Placement(1, (ONE,) * 3), 2, "none")
    near, far = 1e-6 + maps(4) / 1e9, 1e-5 + maps(16) / 1e8
    assert first.forward == pytest.approx(convolution(3, 4))
    assert first.backward == pytest.approx(convolution(3, 4) + near)
    assert second.forward == pytest.approx(convolution(4, 16) + near)
    assert second.backward == pytest.approx(2 * convolution(4, 16) + far)
    head = 4 * 2 * 6 * 5 / 1e9
    assert third.forward == pytest.approx(convolution(16, 6) + head + far)
    assert third.backward == pytest.approx(2 * (convolution(16, 6) + head))


def test_a_message_between_grids_is_that_of_the_ranks_that_are_furthest_apart(three, figures):
    """Ranks 0 to 2 share a node, 3 is alone on one."""
    two = replace(three, names=("2",))
    placement = Placement(1, ((2, 1), (2, 1)))
    seconds = []
    for nodes in (3, 4):
        cluster = cluster_of(figures | {"ranks_per_node": nodes})
        seconds.append(stage_costs(two, cluster, placement, 2, "none")[0].backward)
    half = maps(4) / 2
    assert seconds[0] - seconds[1] == pytest.approx(half / 1e8 - half / 1e9 + 1e-5 - 1e-6)


@pytest.mark.parametrize(
    ("batch", "microbatches", "data", "samples"),
    [(8, 1, 4, 2), (7, 2, 2, 2), (9, 2, 1, 5)],
)
def test_the_largest_part_of_a_batch_counts(three, paper, batch, microbatches, data, samples):
    found = stage_costs(
        replace(three, batch=batch), paper, Placement(data, (ONE,)), microbatches, "none"
    )
    assert found[0].input == maps(3, samples)


def test_ranks_of_a_stage_that_divides_samples_have_a_part_of_them(three, paper):
    """Five samples over two ranks, as ``parallel.local_dp=2`` does it."""
    placement = Placement(1, ((2, 1), ONE), batch=(1, 2))
    two = replace(three, names=("2",), batch=10)
    cut, divided = stage_costs(two, paper, placement, 2, "none")
    assert cut.input == maps(3, 5) / 2
    assert divided.input == maps(4, 3)
    assert divided.forward_peak == maps(4, 3) + maps(16, 3) + maps(16, 3)


def test_blocks_that_run_again_leave_the_layers_of_stages_as_they_are(job, paper):
    found = stage_costs(job, paper, Placement(1, (ONE, ONE)), 2, "block")
    assert [one.layers for one in found] == list(pairwise(job.bounds((1, 1))))
    assert len(job.costs(4, ONE, True).layers) < len(job.program(True).names)


def test_buffers_are_those_of_the_stage(paper):
    job = chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5))
    found = stage_costs(replace(job, names=("2",)), paper, Placement(1, (ONE, ONE)), 2, "none")
    assert [one.buffers for one in found] == [4 * 2 * 4 + 8, 4 * 2 * 5 + 8]


# --- a network that is no chain


def really_alive_in(stage, number, passing, image, segments):
    """Bytes that a stage holds, and most in forward and in backward, its weights aside."""
    ledger, stage = Ledger(), meta_copy(stage).train()
    for tensor in (*stage.parameters(), *stage.buffers()):
        ledger.own(tensor)
    images = torch.empty(4, *image, device="meta")
    ledger.own(images)
    with ledger.watch(), torch.device("meta"), keyed(0, 0, 0):
        tiles = {IMAGE: images} if number == 0 else {}
        grads = {}
        for border, values in passing.items():
            for value, part in values.items():
                if border.taker == number:
                    tiles[value] = torch.empty(part.shape, requires_grad=True)
        given = stage({value: enter(tile) for value, tile in tiles.items()}, 4)
        since = len(ledger.moments)
        held = sum(one.bytes for one in ledger.memories if one.died is None)
        if OUTPUT in given:
            dry_loss(given[OUTPUT], segments, (4, *image), dry_mesh((1, 1))).backward()
        else:
            for border, values in passing.items():
                for value, part in values.items():
                    if border.giver == number:
                        grads[value] = torch.empty(part.shape)
            torch.autograd.backward([given[value] for value in grads], list(grads.values()))
    alive = [
        sum(m.bytes for m in ledger.memories if m.born <= t and (m.died is None or m.died > t))
        for t in range(len(ledger.moments))
    ]
    return held, max(alive[:since]), max(alive[since:])


@pytest.mark.parametrize(("stages", "recompute"), [(2, "block"), (3, "none"), (4, "block")])
def test_what_crosses_stages_is_held_as_it_really_is(paper, stages, recompute):
    """A value that passes by a stage lives on the stages that make and take it alone."""
    # of many classes, the loss takes most
    classes = 40 if stages == 2 else 3
    model, image = unet(num_classes=classes, width=4, depth=2), (3, 32, 24)
    job = planned(model, image, segments=True)
    placement = Placement(1, (ONE,) * stages)
    found = stage_costs(job, paper, placement, 1, recompute)
    cut_up = cut(meta_copy(model), placement.widths, None, image, recompute == "block")
    passing = HandoverShapes(cut_up, placement, image, torch.float32).of(4)
    assert any(border.taker > border.giver + 1 for border in passing) == (stages > 2)
    for number, (one, stage) in enumerate(zip(found, cut_up, strict=True)):
        held, forward, backward = really_alive_in(stage, number, passing, image, True)
        assert (one.held, one.forward_peak) == (held, forward)
        # or more: gradients of other stages, of which one arrives in parts
        assert one.first_backward_peak == max(backward, held + one.arriving[1])


# --- the loss


def segmenting(classes):
    made = chain(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, classes, 1))
    return replace(made, segments=True)


def test_the_loss_takes_time_in_backward(figures):
    rates = {"conv": {"bytes_per_second": 1e30}, "pointwise": {"bytes_per_second": 1e9}}
    cluster = cluster_of(figures | {"rates": rates})
    job = segmenting(5)
    (found,) = stage_costs(job, cluster, Placement(1, (ONE,)), 2, "none")
    tanh = maps(4)
    logits, labels = maps(5), 2 * maps(1)
    forward = 2 * logits + (logits + labels)  # the logarithms, and the sum of those of the labels
    backward = (2 * logits + labels) + 3 * logits
    assert found.forward == pytest.approx(2 * tanh / 1e9, rel=1e-2)
    assert found.backward == pytest.approx((3 * tanh + forward + backward) / 1e9, rel=1e-2)


def test_what_is_said_takes_time(figures):
    """A halo in forward; of the loss a sum in either direction."""
    link = {"seconds": 1.0, "bytes_per_second": 1e30}
    cluster = cluster_of(figures | {"within_node": link})
    (found,) = stage_costs(segmenting(5), cluster, Placement(1, ((2, 1),)), 2, "none")
    assert found.forward == pytest.approx(1, rel=1e-3)
    assert found.backward == pytest.approx(2 * 2, rel=1e-3)


# --- channels


def test_ranks_that_divide_channels_share_weights_work_and_messages(paper):
    """A convolution from 4 to 16 maps gives some maps, one from 16 to 6 sums, of two ranks."""
    job = chain(nn.Conv2d(3, 16, 1, bias=False), nn.Conv2d(16, 6, 1, bias=False))
    whole, own = (
        stage_costs(job, paper, Placement(1, (ONE,), tensor=(ranks,)), 2, "none")[0]
        for ranks in (1, 2)
    )
    assert own.weights == whole.weights / 2 == weights((3, 16), (16, 6)) / 2
    # reduce-scatter of the sums, and all-gather of the outputs; of their gradient an all-gather
    summed, gathered = maps(6) / 2, maps(3)
    assert own.channels == own.sent == summed + gathered + gathered
    assert (own.halos, whole.channels) == (0, 0)
    work = (convolution(3, 16) + convolution(16, 6)) / 2
    talk = (summed + gathered) / 1e9 + 2e-6
    assert own.forward == pytest.approx(work + talk, rel=1e-3)


def test_each_rank_that_divides_channels_gets_what_is_handed_over(paper):
    job = chain(nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 6, 1, bias=False))
    one, many = (
        stage_costs(job, paper, Placement(1, (ONE, ONE), tensor=(1, ranks)), 2, "none")
        for ranks in (1, 3)
    )
    assert [costs.sent for costs in one] == [maps(4), maps(4)]
    assert many[0].sent == 3 * maps(4)  # and gets the gradient of one of them
    assert many[1].sent - many[1].channels == maps(4)
    assert many[1].forward - one[1].forward > 2 * maps(4) / 1e9 - convolution(4, 6)
    back = stage_costs(job, paper, Placement(1, (ONE, ONE), tensor=(3, 1)), 2, "none")
    assert back[1].sent == 3 * maps(4)  # to each the gradient
    assert back[0].sent - back[0].channels == maps(4)


def test_channels_that_cannot_be_divided_are_named(paper):
    job = chain(Writing())
    with pytest.raises(CannotWork, match=r"its channels cannot be divided over 2 ranks: .*copy"):
        stage_costs(job, paper, Placement(1, (ONE,), tensor=(2,)), 2, "none")
