from __future__ import annotations

import pytest
import torch

from spatialdl.data.loader import sample_order, to_input
from spatialdl.training.parts import RunParts
from tests.data import own_datasets
from tests.fitting import make_parts

SMALL = "++model._target_=tests.mpi.training.small.small ~model.width"
UNET = "model=unet ++model.width=2 ++model.depth=1"
NETWORKS = {"segmentation": UNET, "classification": SMALL}


def parts(*words: str) -> RunParts:
    given = ("data.image_size=[12,9]", "data.num_classes=3", "++data.samples=7")
    more = ("data.batch_size=4", "parallel.microbatches=2", "trainer.precision=float64")
    network = () if any("model" in word for word in words) else SMALL.split()
    return make_parts(*given, *more, "trainer.max_steps=1", "device=cpu", *network, *words)


@pytest.mark.parametrize("task", NETWORKS)
def test_micro_batches_hold_images_as_the_network_takes_them_and_their_targets(task):
    made = parts("data/augment=pathology", *NETWORKS[task].split())
    loader, views = made.train_loader, made.sources.train_views
    order = sample_order(7, 0, 3).tolist()
    (batch,) = loader.batches(epoch=3, first=1)  # the last, of 3 samples
    assert (len(loader), [loader.samples(number) for number in (0, 1)]) == (2, [4, 3])
    seen = []
    for part in loader.microbatches(batch):
        own = order[4 + len(seen) : 4 + len(seen) + part.samples]
        seen += own
        assert part.share == pytest.approx(len(own) / 3)
        for tile, target, sample in zip(part.tile, part.target, own, strict=True):
            pixels = views.read(3, sample, (0, 12, 0, 9))
            expected = to_input(torch.from_numpy(pixels[None]), torch.float64, tile.device)[0]
            assert torch.equal(tile, expected)
            assert target.dtype == torch.int64
            if task == "segmentation":
                assert (target.numpy() == views.read_mask(3, sample, (0, 12, 0, 9))).all()
            else:
                assert target == views.labels[sample]
    assert seen == order[4:]


def test_validation_is_in_order_and_not_augmented():
    made = parts("data/augment=pathology", "data.validation_samples=5")
    labels, images = made.sources.validation.labels, made.sources.validation
    batches = list(made.validation_loader.batches())
    assert [list(map(list, made.validation_loader.own(n))) for n in (0, 1)] == [
        [[0, 1], [2, 3]],
        [[], [4]],
    ]
    found = torch.cat([part.labels for batch in batches for part in batch])
    assert found.tolist() == labels.tolist()
    assert (batches[0][0].tiles[0].numpy() == images.read(0)).all()
    assert parts("data.validation_samples=0").validation_loader is None


def test_masks_of_classes_that_the_data_has_not_are_refused_before_they_travel():
    made = parts("task=segmentation", *UNET.split())
    loader = made.train_loader
    (batch, *_) = loader.batches()
    assert loader.microbatches(batch)
    batch[0].masks[0, 1, 1] = 255  # without a class
    assert loader.microbatches(batch)
    batch[0].masks[0, 1, 1] = 3
    with pytest.raises(ValueError, match="has 3 classes, but a mask has a pixel of class 3"):
        loader.microbatches(batch)


STREAM = "parallel.stream=[2,3]"


def read_boxes(views, monkeypatch) -> list[tuple]:
    """Record the reads of a data set."""
    asked: list[tuple] = []
    for name in ("read", "read_mask"):
        plain = getattr(type(views), name)

        def read(self, epoch, sample, box, plain=plain, name=name):
            asked.append((name, epoch, sample, box))
            return plain(self, epoch, sample, box)

        monkeypatch.setattr(type(views), name, read)
    return asked


@pytest.mark.parametrize("task", NETWORKS)
def test_ranks_with_virtual_tiles_read_the_box_that_is_wanted_and_no_more(task, monkeypatch):
    words = ("data/augment=pathology", *NETWORKS[task].split(), f"task={task}")
    plain, made = parts(*words).train_loader, parts(*words, STREAM)
    views, loader = made.sources.train_views, made.train_loader
    (whole,) = plain.batches(epoch=3, first=1)
    expected = plain.microbatches(whole)
    asked = read_boxes(views, monkeypatch)
    (batch,) = loader.batches(epoch=3, first=1)
    found = loader.microbatches(batch)
    assert asked == []  # nothing is read yet
    order = sample_order(7, 0, 3).tolist()[4:]
    for one, other in zip(found, expected, strict=True):
        own, order = order[: one.samples], order[one.samples :]
        assert (one.samples, one.share, one.tile) == (other.samples, other.share, None)
        assert one.images.shape == tuple(other.tile.shape) == (one.samples, 3, 12, 9)
        assert (one.images.dtype, one.images.size) == (torch.float64, (12, 9))
        part = one.images[..., 4:8, 3:7]
        assert part.is_contiguous()
        assert torch.equal(part, other.tile[..., 4:8, 3:7])
        assert asked == [("read", 3, sample, (4, 8, 3, 7)) for sample in own]
        asked.clear()
        if task == "classification":
            assert torch.equal(one.target, other.target)
            assert one.masks is None
            continue
        assert one.target is None
        assert (one.masks.shape, one.masks.dtype) == ((one.samples, 12, 9), torch.int64)
        assert torch.equal(one.masks[..., 0:5, 8:9], other.target[..., 0:5, 8:9])
        assert asked == [("read_mask", 3, sample, (0, 5, 8, 9)) for sample in own]
        asked.clear()


VALIDATED = (*UNET.split(), "task=segmentation", "data.validation_samples=3", STREAM)


@pytest.mark.parametrize("is_own", [False, True])
def test_masks_to_validate_on_are_read_in_parts_but_for_a_loss_of_the_users(is_own):
    """Which sees whole maps."""
    own = ["task.loss={_target_: torch.nn.CrossEntropyLoss}"] if is_own else []
    loader = parts(*VALIDATED, *own).validation_loader
    (batch,) = loader.batches()
    first, second = loader.microbatches(batch)
    assert first.tile is None
    assert second.images[..., 2:3, 0:9].shape == (2, 3, 1, 9)
    if is_own:
        assert first.masks is None
        assert (first.target.shape, second.target.shape) == ((1, 12, 9), (2, 12, 9))
    else:
        assert first.target is None
        assert first.masks.shape == (1, 12, 9)
        assert second.masks[..., 2:3, 0:9].shape == (2, 1, 9)


def test_masks_of_other_classes_are_refused_where_they_are_read():
    made = parts("task=segmentation", *UNET.split(), "data.num_classes=3", STREAM)
    source = made.sources.train
    (batch, *_) = made.train_loader.batches()
    (one, *_) = made.train_loader.microbatches(batch)
    assert one.masks[..., 0:2, 0:2].shape == (2, 2, 2)
    plain = type(source).read_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "read_mask", lambda *given: plain(*given) * 0 + 7)
        with pytest.raises(ValueError, match="a mask has a pixel of class 7"):
            one.masks[..., 0:2, 0:2]


@pytest.mark.parametrize("kind", ["Noise", "Masks"])
def test_samples_of_a_data_set_of_the_users_are_made_once_for_all_virtual_tiles(kind, monkeypatch):
    """Whole samples would be created again for each part."""
    own = ("data=dataset", f"data.dataset._target_={own_datasets.__name__}.{kind}")
    words = [*own, "data.num_classes=2", "++data.dataset.size=[12,9]"]
    if kind == "Masks":
        words += ["task=segmentation", *UNET.split()]
    plain, loader = parts(*words).train_loader, parts(*words, STREAM).train_loader
    made = []
    plain_item = own_datasets.Noise.__getitem__
    monkeypatch.setattr(
        own_datasets.Noise, "__getitem__", lambda one, n: made.append(n) or plain_item(one, n)
    )
    expected = plain.microbatches(next(iter(plain.batches())))
    made.clear()
    found = loader.microbatches(next(iter(loader.batches())))
    samples = sum(one.samples for one in found)
    for one, other in zip(found, expected, strict=True):
        for place in ((..., slice(0, 6), slice(3, 6)), (..., slice(6, 12), slice(0, 9))):
            assert torch.equal(one.images[place], other.tile[place])
            if kind == "Masks":
                assert torch.equal(one.masks[place], other.target[place])
    assert len(made) >= samples
    again = len(made)
    found[0].images[..., 0:12, 0:9]
    assert len(made) == again
