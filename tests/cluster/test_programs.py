"""Lightning programs, features and virtual tiles on two nodes equal those of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.analysis.command import main as analyze
from spatialdl.data.feature_file import list_features
from spatialdl.features.command import main as compute_features
from spatialdl.slides.synthetic.drawing import write_synthetic_slide
from tests.cluster import lightning_program
from tests.cluster.alone import losses_alone
from tests.cluster.slurm import SRUN, TRAIN, run
from tests.training.checkpoints.runs import losses, table

pytestmark = pytest.mark.slow


def printed(cwd: Path, *words: str) -> str:
    """The output of a command on two nodes, with a rank on each."""
    done = run([*SRUN, "-N2", "-n2", *words], cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_lightning_program_trains_and_saves_as_one_process(tmp_path):
    said = printed(tmp_path, sys.executable, lightning_program.__file__)
    for rank in (0, 1):
        assert said.count(f"rank {rank} of 2 is rank 0 of node {rank}") == 1, said
    lightning_program.trained("auto", tmp_path / "one")
    ours, plain = (files_of(tmp_path / name) for name in ("run", "one"))
    assert ours.keys() == plain.keys()
    (saved,) = [name for name in plain if name.endswith(".ckpt")]
    assert_close(numbers(ours["metrics.csv"]), numbers(plain["metrics.csv"]))
    weights, expected = (torch.load(files[saved])["state_dict"] for files in (ours, plain))
    assert_close(weights, expected)


def files_of(folder: Path) -> dict[str, Path]:
    """All files in a folder, by their paths within it."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return dict(sorted(found.items()))


def numbers(file: Path) -> dict[str, list[float]]:
    """The columns of a table; NaN where a row has nothing."""
    rows = table(file)
    assert rows
    return {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}


def assert_close(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10, equal_nan=True)


ENCODER = """
from tests.features.tiny import Tiny


class Net(Tiny):
    pass
"""
FEATURES = [
    *("slides", "--mpp", "0.5", "--encoder", "encoders.Net", "--device", "cpu"),
    *("--precision", "float64", "--dtype", "float32"),
]
KMEANS = ["kmeans", "one/h5", "-k", "3", "--seed", "2"]


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> Path:
    """A folder with slides, the encoder of a user, and `one`: the features of one process."""
    cwd = tmp_path_factory.mktemp("features")
    (cwd / "slides").mkdir()
    for name, size in (("a", (512, 640)), ("b", (384, 512))):
        write_synthetic_slide(cwd / "slides" / f"{name}.tiff", "ring", size=size, seed=3)
    (cwd / "encoders.py").write_text(ENCODER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        assert compute_features([*FEATURES, "--out", "one"]) == 0
    return cwd


def test_features_of_an_encoder_of_ones_own_are_those_of_one_process(features):
    said = printed(features, "spatialdl-features", *FEATURES, "--out", "two")
    assert said.count("12 features of each of") == 1, said
    ours, plain = (files_of(features / name) for name in ("two", "one"))
    assert ours.keys() == plain.keys()
    listed, expected = (untimed(files["process_list.csv"]) for files in (ours, plain))
    assert listed == expected
    two, one = (list_features([features / name]) for name in ("two", "one"))
    assert [file.slide for file in two] == [file.slide for file in one] == ["a", "b"]
    for file, other in zip(two, one, strict=True):
        np.testing.assert_array_equal(file.coords(), other.coords())
        np.testing.assert_allclose(file.read(), other.read(), rtol=1e-6, atol=1e-10)
        np.testing.assert_equal(file.attributes, other.attributes)


def untimed(file: Path) -> list[dict[str, str]]:
    """A table without the seconds that its rows took."""
    return [row | {"seconds": ""} for row in table(file)]


def test_clusters_of_features_are_those_of_one_process(features, monkeypatch):
    monkeypatch.chdir(features)
    printed(features, "spatialdl-analyze", *KMEANS, "--out", "of_two")
    assert analyze([*KMEANS, "--out", "of_one"]) == 0
    ours, plain = (files_of(features / name) for name in ("of_two", "of_one"))
    assert ours.keys() == plain.keys()
    summary, expected = (json.loads(files["summary.json"].read_text()) for files in (ours, plain))
    assert (summary.pop("ranks"), expected.pop("ranks")) == (2, 1)
    assert summary.pop("inertia") == pytest.approx(expected.pop("inertia"), rel=1e-10)
    assert summary | {"seconds": 0} == expected | {"seconds": 0}
    centres, others = (np.load(files["model.npz"])["cluster_centers_"] for files in (ours, plain))
    np.testing.assert_allclose(centres, others, rtol=1e-10)
    for slide in ("a", "b"):
        tiles = f"tiles/{slide}.csv"
        assert_close(numbers(ours[tiles]), numbers(plain[tiles]))


TILES = [
    *("data.image_size=[70,67]", "data.num_classes=3", "data.samples=7", "data.batch_size=4"),
    *("data.validation_samples=0", "model.width=8", "trainer.precision=float64", "device=cpu"),
    *("trainer.max_steps=3", "trainer.report=false"),
]
STREAMED = [
    *("parallel=sp", "parallel.grid=[2,1]", "parallel.stream=[2,1]", "comm.check=true"),
    *("trainer.memory_limit_gb=0.0003", "hydra.run.dir=run"),
]


def test_training_on_virtual_tiles_equals_one_process(tmp_path):
    printed(tmp_path, *TRAIN, *TILES, *STREAMED)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    plain = losses_alone(tmp_path / "one", *TILES)
    assert losses(tmp_path / "run") == pytest.approx(plain, abs=1e-10)
    assert len(plain) == 3
