from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spatialdl.data.augmentation.drawing import Draw, draw
from spatialdl.data.augmentation.settings import Augmentation

ALL = Augmentation("random", 0.5, True, 0.2, 0.3, 0.4, 0.1, 0.05, 2.0)


def test_nothing_is_drawn_of_what_is_off():
    assert draw(Augmentation(), 0, 0, 0) == Draw()


def test_a_draw_follows_from_seed_epoch_and_sample():
    keys = [(seed, epoch, sample) for seed in (0, 1) for epoch in (0, 1) for sample in (0, 1)]
    draws = [draw(ALL, *key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [draw(ALL, *key) for key in keys] == draws


def test_draws_do_not_touch_the_order_of_samples():
    """A sample's numbers are no continuation of another stream with the same seed."""
    ours = draw(replace(ALL, flip=0.0), 3, 4, 0).crop
    assert ours != tuple(np.random.default_rng([3, 4, 0]).random(2))
    assert ours != tuple(np.random.default_rng([3, 4]).random(2))


def test_one_setting_leaves_what_is_drawn_for_others():
    with_all, without = draw(ALL, 0, 0, 5), draw(replace(ALL, hue=0, stain=0), 0, 0, 5)
    assert without == replace(with_all, hue=0.0, stain=None)


def test_draws_fill_their_ranges():
    draws = [draw(ALL, 0, epoch, sample) for epoch in range(10) for sample in range(100)]

    def spread(values, low, high):
        values = np.array(values)
        assert values.min() >= low
        assert values.max() <= high
        margin = 0.02 * (high - low)
        assert values.min() < low + margin
        assert values.max() > high - margin
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))

    spread([d.crop[0] for d in draws], 0, 1)
    spread([d.crop[1] for d in draws], 0, 1)
    spread([d.brightness for d in draws], 0.8, 1.2)
    spread([d.contrast for d in draws], 0.7, 1.3)
    spread([d.saturation for d in draws], 0.6, 1.4)
    spread([d.hue for d in draws], -0.1, 0.1)
    spread([d.sigma for d in draws], 0, 2)
    for channel in range(3):
        spread([d.stain[0][channel] for d in draws], 0.95, 1.05)
        spread([d.stain[1][channel] for d in draws], -0.05, 0.05)
    assert np.bincount([d.turns for d in draws]).tolist() == pytest.approx([250] * 4, abs=60)
    assert sum(d.flip_rows for d in draws) == pytest.approx(500, abs=80)
    assert sum(d.flip_cols for d in draws) == pytest.approx(500, abs=80)
    assert sum(d.flip_rows == d.flip_cols for d in draws) == pytest.approx(500, abs=80)
