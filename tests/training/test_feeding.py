from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.comm.alone import Alone
from spatialdl.data.loader import sample_order, to_input
from spatialdl.training.parts import Parts

NETWORKS = {"segmentation": "unet", "classification": "resnet18"}


def parts(*overrides: str) -> Parts:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("++model.width=2", "data.image_size=[12,9]", "trainer.max_steps=1"),
                *("data.num_classes=3", "data.samples=7", "data.batch_size=4", "device=cpu"),
                *("parallel.microbatches=2", "trainer.precision=float64", *overrides),
            ],
        )
    return Parts(config, Alone())


@pytest.mark.parametrize("task", NETWORKS)
def test_micro_batches_hold_images_as_the_network_takes_them_and_their_targets(task):
    made = parts("data/augment=pathology", f"model={NETWORKS[task]}")
    feed, views = made.train_feed, made.sources.train_views
    order = sample_order(7, 0, 3).tolist()
    (batch,) = feed.batches(epoch=3, first=1)  # the last, of 3 samples
    assert (len(feed), [feed.samples(number) for number in (0, 1)]) == (2, [4, 3])
    seen = []
    for part in feed.microbatches(batch):
        own = order[4 + len(seen) : 4 + len(seen) + part.samples]
        seen += own
        assert part.share == pytest.approx(len(own) / 3)
        for tile, target, sample in zip(part.tile, part.target, own, strict=True):
            pixels = views.read(3, sample, (0, 12, 0, 9))
            expected = to_input(torch.from_numpy(pixels[None]), torch.float64, torch.device("cpu"))[
                0
            ]
            torch.testing.assert_close(tile, expected, rtol=0, atol=0)
            assert target.dtype == torch.int64
            if task == "segmentation":
                assert (target.numpy() == views.read_mask(3, sample, (0, 12, 0, 9))).all()
            else:
                assert target == views.labels[sample]
    assert seen == order[4:]


def test_validation_is_in_order_and_not_augmented():
    made = parts("data/augment=pathology", "data.validation_samples=5")
    labels, images = made.sources.validation.labels, made.sources.validation
    batches = list(made.validation_feed.batches())
    assert [list(map(list, made.validation_feed.own(n))) for n in (0, 1)] == [
        [[0, 1], [2, 3]],
        [[], [4]],
    ]
    found = torch.cat([part.labels for batch in batches for part in batch])
    assert found.tolist() == labels.tolist()
    assert (batches[0][0].tiles[0].numpy() == images.read(0)).all()
    assert parts("data.validation_samples=0").validation_feed is None


def test_masks_of_classes_that_the_data_has_not_are_refused_before_they_travel():
    made = parts("task=segmentation", "model=unet")
    feed = made.train_feed
    (batch, *_) = feed.batches()
    assert feed.microbatches(batch)
    batch[0].masks[0, 1, 1] = 255  # without a class
    assert feed.microbatches(batch)
    batch[0].masks[0, 1, 1] = 3
    with pytest.raises(
        ValueError, match="tells 3 classes apart, but a mask has a pixel of class 3"
    ):
        feed.microbatches(batch)
