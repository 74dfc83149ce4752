from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from spatialdl.models import resnet18, resnet50, resnet110_v2, unet
from spatialdl.pipeline.balance import measured
from spatialdl.pipeline.recorder import CannotRecord
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.steps import IMAGE, Recording, Value, output_of, run_step
from spatialdl.spatial.meta import KNOWN, meta_copy
from tests.pipeline.cutting import run_stages, stages_of, trained

NETWORKS = {
    "resnet18": lambda: resnet18(num_classes=4, width=4).double(),
    "resnet50": lambda: resnet50(num_classes=4, width=4).double(),
    "resnet110_v2": lambda: resnet110_v2(num_classes=4, width=4).double(),
    "unet": lambda: unet(width=2).double(),
}


class Runs(nn.Module):
    """Its forward is a function."""

    def __init__(self, function, **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor):
        return self.function(self, x)


def recorded(model: nn.Module, samples: int = 2, training: bool = True, size=(3, 9, 7)):
    return Forward(model, size).of(samples, training)


def replayed(model: nn.Module, recording: Recording, x: Tensor):
    values = {IMAGE: x}
    for step in recording.steps:
        run_step(step, model, values, x.device)
    return output_of(recording, values)


def names(recording: Recording) -> list[str]:
    return [step.name for step in recording.steps]


def test_operations_of_a_network_are_computed_once_by_shape():
    """PyTorch's meta device takes a millisecond for BatchNorm, of which networks have hundreds."""
    model = resnet50(num_classes=4, width=4)
    first = recorded(model)
    count = len(KNOWN)
    assert count > 0
    again = recorded(model)
    assert len(KNOWN) == count
    assert names(again) == names(first)
    assert again.sizes == first.sizes


def test_an_unusual_forward_runs_again_as_it_was():
    """Loops, branches on sizes, tuples, writes in place and into views, new tensors."""

    def forward(self, x):
        parts = []
        for part in x.chunk(3, dim=1):
            y = self.conv(part)
            if y.shape[-1] % 2:
                y = F.pad(y, (0, 1))
            parts.append(y)
        parts[0] += 1  # the same tensor in the list
        first, *rest = parts
        first[:, :, 0].mul_(2)
        stacked = torch.stack([first, *rest]) + torch.arange(first.shape[-1], dtype=x.dtype)
        with torch.no_grad():
            scale = stacked.mean() + self.norm.weight.sum()
        return {"out": (stacked * scale).view(3, x.size(0), -1).sum(0), "parts": (rest[0], None)}

    model = Runs(forward, conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(5)).double()
    for samples in (2, 3):
        x = torch.randn(samples, 3, 9, 7, dtype=torch.float64)
        expected = model(x)
        found = replayed(model, recorded(model, samples), x)
        assert torch.equal(found["out"], expected["out"])
        assert torch.equal(found["parts"][0], expected["parts"][0])
        assert found["parts"][1] is None


def test_gradients_are_those_of_the_network():
    def forward(self, x):
        with torch.no_grad():
            y = self.one(x)
        return self.two(y * self.one.weight.sum()).flatten(1).sum(1)

    model = Runs(forward, one=nn.Conv2d(3, 3, 1), two=nn.Conv2d(3, 2, 3)).double()
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    grads = []
    for run in (model, lambda x: replayed(model, recorded(model), x)):
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 3  # the bias of the first has none
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_what_is_written_in_place_is_a_new_value():
    """Or a stage that takes it would get it as it was before."""

    def forward(self, x):
        y = self.conv(x)
        view = y[:, :1]
        view.zero_()
        self.relu(y)
        return y * 2

    model = Runs(forward, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU(inplace=True))
    steps = recorded(model).steps
    last = steps[-1]
    (taken,) = last.takes
    zero = next(number for number, step in enumerate(steps) if step.name == "zero_")
    relu = next(number for number, step in enumerate(steps) if step.name == "relu")
    assert steps[relu].takes == (Value(zero + 1),)  # y, of which a view has been written into
    assert taken == Value(relu)
    assert Value(zero + 1) in recorded(model).written


def test_blocks_and_what_torch_has_stay_whole_and_the_rest_is_opened():
    network = Runs(
        lambda self, x: self.head(self.inner(self.body(x))),
        body=nn.Sequential(nn.Conv2d(3, 3, 1), Runs(lambda self, x: x.relu() + 1)),
        inner=Runs(lambda self, x: self.conv(x).sigmoid(), conv=nn.Conv2d(3, 3, 1)),
        head=nn.Flatten(),
    )
    recording = recorded(network)
    assert names(recording) == ["body.0", "body.1", "inner.conv", "sigmoid", "head"]
    assert [step.path for step in recording.steps][2:4] == ["inner.conv", "inner"]


def test_what_has_a_hook_stays_whole():
    hooked = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert names(recorded(nn.Sequential(hooked, nn.ReLU()))) == ["0", "1"]


class Twice(torch.autograd.Function):
    """Its gradient is not that of what it does."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


def test_an_autograd_function_is_one_step_with_its_own_backward():
    """What it calls inside once was taken for steps of the network, without a gradient."""
    model = Runs(lambda self, x: Twice.apply(self.conv(x)).tanh(), conv=nn.Conv2d(3, 1, 1))
    recording = recorded(model)
    assert names(recording) == ["conv", "Twice", "tanh"]
    x = torch.randn(2, 3, 9, 7)
    gradients = []
    for run in (model, lambda x: replayed(model, recording, x)):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append(model.conv.weight.grad.clone())
    assert torch.equal(*gradients)
    assert Twice.apply.__self__ is Twice


def test_a_part_that_cannot_be_written_down_stays_whole():
    inner = Runs(lambda self, x: x.relu())
    part = Runs(lambda self, x: checkpoint(self.inner, x, use_reentrant=True), inner=inner)
    assert names(recorded(Runs(lambda self, x: self.part(x).tanh(), part=part))) == ["part", "tanh"]
    with pytest.raises(CannotRecord, match=r"passes a function or a module on"):
        recorded(part)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, "meta"),
        (lambda self, x: 3, "returns no tensor"),
        (lambda self, x: x + self.constant, "an attribute that is not a buffer"),
    ],
)
def test_what_depends_on_numbers_cannot_be_recorded(forward, reason):
    model = Runs(forward)
    model.constant = torch.ones(1)
    with pytest.raises(CannotRecord, match=reason):
        recorded(model)


def test_autocast_outside_of_a_block_is_refused():
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(x)

    with pytest.raises(CannotRecord, match="autocast"):
        recorded(Runs(forward, conv=nn.Conv2d(3, 3, 1)))


def test_another_way_for_other_samples_or_in_evaluation_is_refused():
    network = Forward(Runs(lambda self, x: x.relu() if len(x) > 2 else x.tanh()), (3, 4, 4))
    network.of(2, True)
    with pytest.raises(CannotRecord, match=r"for 3 samples in training.*'relu' instead of 'tanh'"):
        network.of(3, True)
    network = Forward(Runs(lambda self, x: x.relu() if self.training else x.tanh()), (3, 4, 4))
    network.of(2, True)
    with pytest.raises(CannotRecord, match=r"in evaluation its forward takes another"):
        network.of(2, False)


def test_who_draws_random_numbers_is_known():
    recording = recorded(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(), nn.ReLU()))
    assert (recording.drawing, recording.loose) == ({"1"}, "")
    recording = recorded(Runs(lambda self, x: F.dropout(x).relu()))
    assert (recording.drawing, recording.loose) == (set(), "dropout")


def test_calls_of_a_module_are_counted():
    relu = nn.ReLU()
    steps = recorded(nn.Sequential(relu, nn.Conv2d(3, 3, 1), relu)).steps
    assert [(step.name, step.nth) for step in steps] == [("0", 0), ("1", 0), ("0", 1)]


def test_recording_leaves_the_network_and_modules_in_general_as_they_are():
    model, call = NETWORKS["resnet18"](), nn.Module.__call__
    before = {key: value.clone() for key, value in model.state_dict().items()}
    recorded(model, size=(3, 32, 32))
    with pytest.raises(CannotRecord):
        recorded(Runs(lambda self, x: 3))
    assert nn.Module.__call__ is call
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_meta_copy_keeps_shapes_and_takes_no_memory(name):
    model = NETWORKS[name]()
    model.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shadow = meta_copy(model)
    shapes = {key: (value.shape, value.dtype) for key, value in shadow.state_dict().items()}
    assert shapes == {key: (value.shape, value.dtype) for key, value in before.items()}
    assert {value.device.type for value in shadow.state_dict().values()} == {"meta"}
    assert not any(p.requires_grad for p in shadow.parameters())
    x = torch.empty(2, 3, 32, 32, dtype=torch.float64, device="meta")
    assert shadow(x).device.type == "meta"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_meta_copy_with_a_cumulative_average_runs_and_leaves_the_original():
    norm = nn.BatchNorm2d(3, momentum=None)
    meta_copy(norm)(torch.empty(2, 3, 4, 4, device="meta"))
    assert norm.momentum is None
    assert int(norm.num_batches_tracked) == 0


def test_tied_weights_stay_tied_in_a_meta_copy():
    layer = nn.Linear(3, 3)
    shadow = meta_copy(nn.Sequential(layer, nn.ReLU(), layer))
    assert shadow[0].weight is shadow[2].weight


@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_whose_weights_are_computed_are_cut_like_others(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double()
    change(model[0])
    change(model[2])
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double()
    change(twin[0])
    change(twin[2])
    stages = stages_of(model, [2])
    found, expected = trained(model, lambda x: run_stages(stages, x)), trained(twin, twin)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    measured(model, recorded(model), (2, 3, 9, 7), torch.device("cpu"))


def test_lazy_modules_are_refused_until_they_have_a_shape():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    with pytest.raises(ValueError, match=r"'0\.weight' of a lazy module: run one forward, on an"):
        recorded(model)
    model(torch.zeros(1, 3, 9, 7))
    assert names(recorded(model)) == ["0", "1"]
