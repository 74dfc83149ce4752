"""What a training step asks of the host, of copies and of the transport, on the simulated device.

Each case is a run of the training command, of which the last of three steps is counted; counts do
not depend on the sizes of images and layers, so these are small. The table of docs/gpus.md::

    SPATIALDL_DEVICE=sim SPATIALDL_DEVICE_PATH=host mpiexec -n 4 \\
        python -m pytest -s -p no:cacheprovider -m slow tests/mpi/pipeline/test_host_waits.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import spatialdl
from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_path
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.random import keyed
from spatialdl.spatial.tensor import from_tile
from spatialdl.training.tasks.mixup import mix_samples
from spatialdl.training.tasks.task import MultiLabel
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.mpi.device import DEVICE, device_key
from tests.mpi.equality import several_ranks

pytestmark = pytest.mark.skipif(DEVICE.type != "sim", reason="only the simulated device counts")

PACKAGE = str(Path(spatialdl.__file__).parent)
CALLS = {
    "messages": ("Isend",),
    "collectives": ("Allreduce", "Iallreduce", "Allgather"),
    "objects": ("bcast", "gather", "allgather", "allreduce", "barrier"),
}
"""Of mpi4py, by what is counted."""


class Counts(NamedTuple):
    """Waits of the host for the device, copies, and launches; calls of MPI, by `CALLS`."""

    waits: int
    to_host: int
    to_device: int
    messages: int
    collectives: int
    launches: int
    objects: int = 0


@contextmanager
def counting() -> Iterator[Callable[[], tuple[Counts, Counter[Any]]]]:
    """Count from here on; what is given tells what was counted, and the lines that have waited."""
    events: Counter[str] = Counter()

    def counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(comm: MpiCommunicator, *args: Any, **kwargs: Any) -> Any:
            events[kind] += 1
            return call(comm, *args, **kwargs)

        return noted

    check.enable(False)  # as programs run: hosts do not wait for each other either
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(check.enable)
        for kind, names in CALLS.items():
            for name in names:
                patch.setattr(MpiCommunicator, name, counted(kind, getattr(MpiCommunicator, name)))
        torch.sim.synchronize()
        torch.sim.reset_counters()
        with torch.sim.wait_sites(PACKAGE) as sites:

            def found() -> tuple[Counts, Counter[Any]]:
                seen = torch.sim.counters()
                copies = (seen.copies.get(f"to the {end}", 0) for end in ("host", "device"))
                calls = (events[kind] for kind in ("messages", "collectives"))
                counts = Counts(seen.host_waits, *copies, *calls, seen.launches, events["objects"])
                return counts, sites

            yield found


SMALL = (
    "data.num_classes=5 data.image_size=[96,96] data.batch_size=4 data.samples=12 data.workers=0 "
    "data.validation_samples=0 trainer.max_steps=3 trainer.report=false trainer.checkpoint.keep=0 "
    "trainer.checkpoint.every_steps=99"
)
RESNET18, RESNET50 = "model=resnet18 model.width=4", "model=resnet50"
UNET, FULL_UNET = "model=unet model.width=4 task=segmentation", "model=unet task=segmentation"
VIT, FULL_VIT = (
    "model=vit model.width=16 model.heads=2 model.pool=mean",
    "model=vit model.pool=mean",
)
BY_NAME = "~model.num_classes ~model.in_channels ~model.width ++model._target_=tests.mpi."
SP, SP4 = "parallel=sp parallel.grid=[2,1]", "parallel=sp parallel.grid=[2,2]"
DP4, GEMS4 = "parallel=dp parallel.data=4", "parallel=gems parallel.stages=4"
PP, PP4 = (f"parallel=pp parallel.stages={n} parallel.microbatches=4" for n in (2, 4))

STEPS: dict[tuple[int, str], Counts] = {
    (2, f"{RESNET18} {SP}"): Counts(76, 74, 74, 31, 45, 1278),
    (2, f"{RESNET18} {SP} trainer.clip_norm=1.0"): Counts(77, 75, 75, 31, 46, 1414),
    (2, f"{RESNET18} {SP} trainer.precision=fp16-mixed"): Counts(76, 74, 74, 31, 46, 1434),
    (2, f"{RESNET18} {SP} optimizer=lars"): Counts(76, 74, 74, 31, 45, 1395),
    (2, f"{RESNET18} {SP} optimizer=lamb task.class_weights=[.5,1,2,3,4]"): Counts(
        76, 74, 74, 31, 45, 1730
    ),
    (2, f"{UNET} {SP} task.class_weights=[.5,1,2,3,4] task.dice=0.5"): Counts(
        81, 79, 79, 35, 46, 1286
    ),
    (2, f"{VIT} {SP}"): Counts(41, 39, 39, 36, 5, 2668),
    (2, f"{RESNET18} parallel=dp"): Counts(4, 2, 2, 0, 5, 712),
    (2, f"{RESNET18} parallel=dp parallel.sync_batchnorm=true"): Counts(44, 42, 42, 0, 46, 1272),
    (2, f"{BY_NAME}equality_networks.OddNet parallel=dp parallel.microbatches=2"): Counts(
        4, 2, 2, 0, 5, 200
    ),
    (2, f"{BY_NAME}sample_networks.averages parallel=dp"): Counts(5, 3, 3, 0, 7, 566),
    (2, f"{RESNET18} parallel=lp"): Counts(3, 1, 1, 1, 1, 423),
    (2, f"{RESNET18} {PP} parallel.schedule=1f1b"): Counts(6, 4, 4, 4, 1, 1135),
    (2, f"{RESNET18} {PP4} parallel.schedule=interleaved parallel.interleave=2"): Counts(
        14, 12, 12, 12, 1, 1169
    ),
    (2, f"{RESNET18} parallel=gems parallel.microbatches=4"): Counts(10, 8, 8, 4, 9, 1079),
    (2, f"{RESNET18} parallel=none parallel.tensor=2"): Counts(43, 41, 41, 41, 1, 565),
    (2, f"{VIT} parallel=none parallel.tensor=2"): Counts(176, 174, 174, 99, 76, 2637),
    (3, f"{RESNET18} parallel=sp+pp parallel.microbatches=2"): Counts(44, 43, 43, 22, 23, 647),
    (4, f"{RESNET50} {SP4}"): Counts(178, 235, 235, 93, 144, 2992),
    (4, f"{RESNET50} {SP4} trainer.clip_norm=1.0"): Counts(179, 236, 236, 93, 145, 3326),
    (4, f"{RESNET50} {SP4} trainer.precision=fp16-mixed"): Counts(178, 235, 235, 93, 145, 2681),
    (4, f"{RESNET50} {SP4} optimizer=lars"): Counts(178, 235, 235, 93, 144, 3274),
    (4, f"{RESNET50} {DP4}"): Counts(37, 35, 35, 0, 38, 1825),
    (4, f"{RESNET50} parallel=lp parallel.stages=4"): Counts(3, 2, 2, 2, 1, 357),
    (4, f"{RESNET50} {PP4} parallel.schedule=1f1b"): Counts(9, 8, 8, 8, 1, 955),
    (4, f"{RESNET50} {GEMS4} parallel.microbatches=4"): Counts(29, 28, 28, 8, 25, 1426),
    (4, f"{FULL_UNET} {SP4}"): Counts(92, 160, 160, 105, 57, 1398),
    (4, f"{FULL_UNET} {DP4}"): Counts(19, 17, 17, 0, 20, 705),
    (4, f"{FULL_UNET} parallel=lp parallel.stages=4"): Counts(5, 4, 4, 4, 1, 179),
    (4, f"{FULL_UNET} {PP4} parallel.schedule=1f1b"): Counts(17, 16, 16, 16, 1, 488),
    (4, f"{FULL_UNET} {GEMS4} parallel.microbatches=4"): Counts(26, 25, 25, 12, 18, 612),
    (4, f"{FULL_VIT} {SP4}"): Counts(156, 154, 154, 108, 48, 4072),
    (4, f"{FULL_VIT} {DP4}"): Counts(46, 44, 44, 0, 46, 1488),
}
"""By the number of ranks and the words of the command: the most of any rank on the path `host`."""


@pytest.mark.parametrize(
    ("ranks", "words"),
    [pytest.param(*step, marks=[pytest.mark.slow] * (step[0] == 4)) for step in STEPS],
)
def test_a_step_stays_within_its_bounds(
    ranks: int, words: str, world: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nccl the host waits for the loss and a look at the gradients; it waited 76 times."""
    if world.size != ranks:
        pytest.skip(f"needs {ranks} ranks")
    found: list[tuple[Counts, Counter[Any]]] = []
    run = Trainer.run_step

    def counted(trainer: Trainer, batch: list[Microbatch]) -> float:
        with counting() as so_far:
            loss = run(trainer, batch)
            found.append(so_far())
        return loss

    monkeypatch.setattr(Trainer, "run_step", counted)
    trainer = Trainer(composed("train", *SMALL.split(), *words.split(), device_key(world)), world)
    fit(trainer, tmp_path / "run")
    counts, sites = found[-1]
    most = Counts(*map(max, zip(*world.allgather(counts), strict=True)))
    path, bound = device_path().name, STEPS[ranks, words]
    if path == "nccl":  # the loss, and a look at the gradients
        bound = bound._replace(waits=2, to_host=0, to_device=0)
    elif path == "mpi":  # also before a transfer between stages
        bound = bound._replace(waits=bound.waits + bound.messages, to_host=0, to_device=0)
    if world.rank == 0:
        row = f"{words} by {path}: {' '.join(map(str, most))}"
        print(f"\n{row}", file=sys.__stderr__, flush=True)
    above = [
        name for name, one, limit in zip(most._fields, most, bound, strict=True) if one > limit
    ]
    assert not above, f"{above} of {most}; {sites.most_common(9)}"


def test_weights_of_classes_are_copied_to_the_device_once() -> None:
    """Of several labels a sample; steps of the other tasks are above."""
    task = MultiLabel(torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    output = torch.rand(4, 5, dtype=torch.float64).to(DEVICE).requires_grad_()
    target = F.one_hot(torch.tensor([0, 1, 4, 0]), 5).double().to(DEVICE)
    for _ in range(2):
        with counting() as found:
            task.loss(output, target).backward()
            task.weights(target)
    assert found()[0][:3] == (0, 0, 0), found()


def test_mixup_does_not_wait() -> None:
    tile, target = torch.rand(4, 3, 8, 8).to(DEVICE), torch.tensor([0, 1, 2, 0]).to(DEVICE)
    with counting() as found:
        mix_samples([Microbatch(4, 1.0, tile, target)], 0.4, 3, 0, 0, 0, 1)
    assert found()[0].waits == 0, found()


def weight(kernel: int) -> Tensor:
    return torch.ones(8, 8, kernel, kernel, device=DEVICE)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, (50, 70), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, (50, 70), mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, (30, 20), mode="bilinear", antialias=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 7),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 7),
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "layer_norm of channels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)),
    "conv": lambda x: F.conv2d(x, weight(3), stride=2, padding=2, dilation=2),
    "conv_transpose": lambda x: F.conv_transpose2d(x, weight(3), stride=2, padding=1),
    "pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: torch.roll(x, (3, 5), (2, 3)),
    "slice": lambda x: x[:, :, 3:, ::2],
    "cat": lambda x: torch.cat([x, x], 2),
    "mean": lambda x: x.mean((2, 3)),
    "std": lambda x: x.std((2, 3)),
    "norm": lambda x: x.norm(),
    "max": lambda x: x.max(3).values,
    "softmax": lambda x: x.softmax(3),
    "logsumexp": lambda x: torch.logsumexp(x, (2, 3)),
    "dropout": lambda x: F.dropout(x, 0.1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1), ignore_index=3),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_copy_their_tables_once(name: str, meshes: dict[tuple[int, int], Mesh]) -> None:
    """Random masks are told their places by a copy that nobody waits for."""
    if device_path().name != "nccl":
        pytest.skip("there are copies of what is sent")
    for mesh in several_ranks(meshes):
        layout = mesh.layout(2, (41, 53))
        for _ in range(2):
            tile = torch.rand(2, 8, *mesh.own_box(layout).shape[1:]).to(DEVICE)
            x = from_tile(tile, layout, mesh).requires_grad_()
            with keyed(0, 0), counting() as found:
                OPERATIONS[name](x).sum().backward()
        counts, sites = found()
        assert counts[:3] == (0, 0, int(name == "dropout")), (counts, sites)
