from __future__ import annotations

import torch

from spatialdl.planning.shapes import run

aten = torch.ops.aten


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
    assert run(aten.add_.Tensor, (x, x), {}, known) is x
    assert known == {}


def test_tensors_with_values_are_calculated():
    x = torch.tensor([-1.0, 2.0])
    assert run(aten.relu.default, (x,), {}, {}).tolist() == [0.0, 2.0]


def test_settings_tell_results_apart():
    known: dict = {}
    x = torch.empty(4, 6, device="meta")
    assert run(aten.sum.dim_IntList, (x, [0]), {}, known).shape == (6,)
    assert run(aten.sum.dim_IntList, (x, [1]), {}, known).shape == (4,)
    wide = run(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}, known)
    assert wide.dtype == torch.float64
