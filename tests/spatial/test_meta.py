from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from spatialdl.models import UNet, VisionTransformer, resnet18
from spatialdl.spatial.meta import KNOWN, dtype_of, meta_copy, on_meta, run

aten = torch.ops.aten
VIT = partial(VisionTransformer, patch=8, width=24, depth=2, heads=2)


def test_a_meta_copy_keeps_shapes_and_ties_and_leaves_the_network():
    layer = nn.Conv2d(3, 3, 1).double().requires_grad_(False)
    model = nn.Sequential(layer, nn.BatchNorm2d(3, momentum=None).double(), layer)
    shadow = meta_copy(model)
    assert shadow[0].weight is shadow[2].weight
    for ours, plain in zip(shadow.state_dict().values(), model.state_dict().values(), strict=True):
        assert (ours.shape, ours.dtype, ours.device.type) == (plain.shape, plain.dtype, "meta")
    assert not shadow[0].weight.requires_grad
    shadow(torch.empty(2, 3, 4, 4, dtype=torch.float64, device="meta"))
    assert (model[1].momentum, int(model[1].num_batches_tracked)) == (None, 0)


def test_images_have_the_type_of_real_numbers_whatever_comes_first():
    for first, expected in ((torch.int8, torch.float16), (torch.complex128, torch.float64)):
        network = nn.Module()
        network.first = nn.Parameter(torch.zeros(2, dtype=first), requires_grad=False)
        network.second = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        assert dtype_of(network) == expected
    assert dtype_of(nn.ReLU()) == torch.float32


def test_a_result_is_worked_out_once_and_has_memory_of_its_own():
    known: dict = {}
    x = torch.empty(2, 3, 8, 8, device="meta", memory_format=torch.channels_last)
    first = run(aten.relu.default, (x,), {}, known)
    again = run(aten.relu.default, (x,), {}, known)
    assert len(known) == 1
    assert (again.shape, again.stride(), again.device.type) == (x.shape, x.stride(), "meta")
    stores = {one.untyped_storage()._cdata for one in (x, first, again)}
    assert len(stores) == 3
    run(aten.relu.default, (x.double(),), {}, known)
    assert len(known) == 2


def test_views_and_what_is_done_in_place_stay_so():
    known: dict = {}
    x = torch.empty(4, 6, device="meta")
    view = run(aten.view.default, (x, [24]), {}, known)
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert known == {}
    assert run(aten.add_.Tensor, (x, x), {}, known) is x
    assert len(known) == 1
    assert run(aten.add_.Tensor, (x, x), {}, known) is x


def test_what_changes_a_shape_or_memory_in_place_is_done_each_time():
    known: dict = {}
    for _ in range(2):
        x = torch.empty(4, 6, device="meta")
        assert run(aten.transpose_.default, (x, 0, 1), {}, known).shape == (6, 4)
        x, other = torch.empty(4, 6, device="meta"), torch.empty(4, 6, device="meta")
        run(aten.set_.source_Tensor, (x, other), {}, known)
        assert x.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert known == {}


def test_settings_tell_results_apart():
    known: dict = {}
    values = torch.tensor([-1.0, 2.0])  # are calculated
    assert run(aten.relu.default, (values,), {}, {}).tolist() == [0.0, 2.0]
    x = torch.empty(4, 6, device="meta")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"), on_meta():
            x.add_(torch.empty(5, device="meta"))
    assert run(aten.sum.dim_IntList, (x, [0]), {}, known).shape == (6,)
    assert run(aten.sum.dim_IntList, (x, [1]), {}, known).shape == (4,)
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    assert run(aten.mul.Tensor, (counts, 2), {}, known).dtype == torch.int64
    assert run(aten.mul.Tensor, (counts, 2.0), {}, known).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run(aten.mul.Tensor, (counts, 2.0), {}, known).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    wide = run(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}, known)
    assert wide.dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "training", "layout"),
    [
        (partial(resnet18, width=8), True, torch.contiguous_format),
        (partial(UNet, width=4), False, torch.channels_last),
        (VIT, True, torch.contiguous_format),
        (partial(UNet, width=4), True, torch.channels_last),
    ],
    ids=["resnet18", "unet, evaluated", "vit", "unet"],
)
def test_a_dry_run_is_that_of_pytorch(make, training, layout):
    """Shapes, strides, dtypes, versions, and what autograd knows, computed and from the cache."""
    model = meta_copy(make().to(memory_format=layout)).train(training)

    def forms() -> list[object]:
        found: list[object] = []

        def note(module: nn.Module, args: object, output: torch.Tensor) -> None:
            found.append(
                (output.shape, output.stride(), output.dtype, output._version, type(output.grad_fn))
            )

        hooks = [module.register_forward_hook(note) for module in model.modules()]
        x = torch.empty(2, 3, 32, 32, device="meta").to(memory_format=layout)
        model(x).sum().backward()
        for hook in hooks:
            hook.remove()
        return [*found, *(p.grad is not None and p.grad.stride() for p in model.parameters())]

    plain = forms()
    KNOWN.clear()
    for _ in range(2):
        with on_meta():
            assert forms() == plain
