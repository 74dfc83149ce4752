"""A Lightning program, and shards on the disks of nodes, equal one process."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.data import ShardDataset, ShardWriter
from tests.cluster import lightning_program
from tests.cluster.slurm import ROOT, SRUN, Job, run
from tests.soak.outcome import files
from tests.training.checkpoints.runs import losses, table

pytestmark = pytest.mark.slow


def test_a_lightning_program_trains_and_saves_as_one_process(tmp_path):
    done = run([*SRUN, "-N2", "-n2", sys.executable, lightning_program.__file__], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    for rank in (0, 1):
        assert said.count(f"rank {rank} of 2 is rank 0 of node {rank}") == 1, said
    lightning_program.trained("auto", tmp_path / "one")
    ours, plain = tmp_path / "run", tmp_path / "one"
    assert files(ours) == files(plain)
    assert_close(numbers(ours / "metrics.csv"), numbers(plain / "metrics.csv"))
    saved = [
        torch.load(path)["state_dict"] for one in (ours, plain) for path in one.rglob("*.ckpt")
    ]
    assert_close(*saved)


def numbers(file: Path) -> dict[str, list[float]]:
    """The columns of a table; NaN where a row has nothing."""
    rows = table(file)
    assert rows
    return {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}


def assert_close(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10, equal_nan=True)


LOOK = """
import json, os, socket
from pathlib import Path
found = Path(os.environ["SLURM_TMPDIR"]).glob(".spatialdl-*/shards/*")
print(json.dumps([os.environ["SLURM_PROCID"], sorted(one.name for one in found)]))
"""


def write(folder: Path) -> list[str]:
    """Images whose upper and lower halves lie in different shards; the names of their copies."""
    draw = np.random.default_rng(0)
    with ShardWriter(folder, ("a", "b"), kind="regions", stripes=2) as writer:
        for number in range(2):
            writer.add(draw.integers(0, 256, (1024, 24, 3), np.uint8), number % 2, "train")
    return [f"{shard.sha256}.h5" for shard in ShardDataset(folder).manifest.shards]


def test_each_node_stages_the_shards_of_its_ranks_and_training_is_the_same(losses_alone, tmp_path):
    upper, lower = write(tmp_path / "set")
    data = ["data=shards", f"data.path={tmp_path / 'set'}", "data.batch_size=2", "device=cpu"]
    model = ["~model.width", "++model._target_=tests.cluster.networks.waiting"]
    once = [*data, *model, "trainer.precision=float64", "trainer.max_steps=20"]
    once.append("trainer.report=false")
    plain = losses_alone(*once, "++model.file=/")
    to = "data.stage.to='${oc.env:SLURM_TMPDIR}'"
    words = [*once, f"++model.file={tmp_path / 'go'}", "parallel=sp", to, "hydra.run.dir=run"]
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    nodes = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    with Job(tmp_path, *nodes, str(script), "run", *words) as job:
        job.says("step 1 of")
        look = [*SRUN, f"--jobid={job.id}", "--overlap", "-n2", sys.executable, "-c", LOOK]

        def on_nodes() -> dict[str, list[str]]:
            done = run(look, tmp_path)
            assert done.returncode == 0, done.stderr
            return dict(json.loads(line) for line in done.stdout.splitlines())

        def have_arrived() -> bool:
            names = [name for found in on_nodes().values() for name in found]
            return len(names) >= 2 and all(name.endswith(".h5") for name in names)

        job.until(have_arrived)
        assert on_nodes() == {"0": [upper], "1": [lower]}
        for shard in (tmp_path / "set").glob("*.h5"):  # from here on there are only the copies
            shard.rename(tmp_path / shard.name)
        (tmp_path / "go").touch()
        job.ends()
    assert losses(tmp_path / "run") == pytest.approx(plain, abs=1e-10)


SMALL_DISK = """
import json, os, socket, subprocess, sys
disk = os.environ["SLURM_TMPDIR"] + "/disk"
os.makedirs(disk, exist_ok=True)
if os.environ["SLURM_PROCID"] == "1":
    subprocess.run([*sys.argv[1:], disk], check=True)
"""


def test_a_node_whose_disk_is_full_reads_from_the_source_which_is_said_once(tmp_path):
    write(tmp_path / "set")
    words = [
        *(sys.executable, "-m", "spatialdl.train", "data=shards", f"data.path={tmp_path / 'set'}"),
        *("data.batch_size=2", "model.width=2", "trainer.max_steps=3", "device=cpu"),
        *("trainer.precision=float64", "parallel=sp", "parallel.grid=[2,2]"),
    ]
    stage = "data.stage.to='${oc.env:SLURM_TMPDIR}/disk'"
    each = [*SRUN, "--ntasks-per-node=1", "-n2", sys.executable, "-c", SMALL_DISK]
    mounted = [*each, "mount", "-t", "tmpfs", "-o", "size=40k", "none"]
    trained = [*SRUN, "-n4", *words, stage, "hydra.run.dir=staged"]
    script = "\n".join(
        ["set -e", *map(shlex.join, [mounted, trained, [*each, "umount", "--lazy"]])]
    )
    nodes = ["-N2", "--ntasks-per-node=2", "-Q"]
    done = run(["salloc", *nodes, "bash", "-c", script], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("staging 1 shard") == said.count("staging 0 shards") == 1, said
    assert said.count("do not fit") == 1
    assert "1 shard (91.7 kB) left at the source" in said
    plain = run([*SRUN, "-N2", "-n4", *words, "data.stage=off", "hydra.run.dir=plain"], tmp_path)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert losses(tmp_path / "staged") == losses(tmp_path / "plain")
