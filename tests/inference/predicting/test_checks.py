"""Configuration checks before ranks start."""

from __future__ import annotations

import pytest

from spatialdl.inference.predicting.checks import check_config
from tests.composing import composed


@pytest.fixture
def given(tmp_path) -> str:
    """Stubs of a checkpoint, slides and shards."""
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "checkpoint.json").touch()
    (tmp_path / "set").mkdir()
    return f"ckpt_path={tmp_path / 'step-00000001'} slides={tmp_path}"


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("min_tissue=0 overlap=0 level=0 tile_size=1 batch_size=1", 1),
        ("parallel=sp parallel.grid=[2,3] whole=true", 6),
        ("parallel.stream=[2,2] memory_limit_gb=2 parallel.stream_to=/tmp", 1),
        ("parallel=dp parallel.data=4 batch_size=4", 4),
        ("slides=null shards=SET split=val", 1),
        ("slides=null volumes=a.nii parallel=sp parallel.grid=[2,1,3]", 6),
        ("slides=null volumes=a.nii parallel=dp parallel.data=3 batch_size=1", 3),
        ("whole=true parallel=pp parallel.microbatches=9", 2),
    ],
)
def test_what_fits(words, ranks, given, tmp_path):
    words = words.replace("SET", f"{tmp_path}/set")
    placement = check_config(composed("predict", *f"{given} {words}".split()))
    assert placement.world_size == ranks


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ckpt_path=latest", "ckpt_path=latest needs a run"),
        ("shards=SET", "got slides and shards"),
        ("slides=null", "got none"),
        ("slides=null volumes=a.nii tile_size=9", "how slides are cut, but volumes are not cut"),
        ("slides=null volumes=a.nii split=val", "split=val selects from shards="),
        ("parallel=sp parallel.grid=[2,1,1]", "has 3 numbers, one too many"),
        ("slides=null volumes=a.nii parallel=sp parallel.grid=[1,2]", r"grid=\[1, 2\] has 2 "),
        ("slides=null shards=SET/none", "is not a folder"),
        ("spatialdata=true maps=false", "maps=false is set"),
        ("spatialdata=true slides=null volumes=a.nii", "volumes=a.nii is given: leave it out"),
        ("batch_size=0", "batch_size=0 must be a whole number of at least 1"),
        ("parallel=sp parallel.grid=[2,1] tile_size=1", "1x1 is smaller than the grid 2x1"),
        ("tile_size=32.5", "tile_size=32.5 must be"),
        ("mpp=true", "mpp=True must be micrometres"),
        ("mpp=0.5 level=0", "are exclusive: leave one out"),
        ("min_tissue=1.01", "min_tissue=1.01 must lie between 0 and 1"),
        ("trust=tests", r"write trust=\[package.Class\]"),
        ("classes=a", r"write classes=\[...\]"),
        ("table=xlsx", "table=xlsx is not supported: use one of csv, parquet"),
        ("parallel=auto", "parallel=auto is for training"),
        ("parallel=dp parallel.shard_state=true", "shard_state=true is for training"),
        ("parallel.stream=auto", "parallel.stream=auto is for training: give the virtual tiles"),
        ("parallel.stream_to=/tmp", "parallel.stream_to=/tmp has no effect without virtual tiles"),
        ("memory_limit_gb=2", "memory_limit_gb=2 has no effect without virtual tiles: set par"),
        ("parallel.stream=[2,2] activation=true", "activation=true is not supported with"),
        ("parallel=dp parallel.data=3 batch_size=2", "batch_size=2 leaves ranks without tiles"),
        ("parallel=pp parallel.microbatches=9", "need at least batch_size=9"),
        ("activation=true maps=false", "activation=true needs maps"),
        ("activation=true tta=flips", "averages several"),
        ("slides=null features=x parallel=sp", "bags of features are not split"),
        ("slides=null features=x tta=d4", "tta=d4 is for images"),
        ("slides=null volumes=x geojson=gzip", "geojson=gzip is for polygons of slides"),
        ("slides=null features=x tile_size=256", "tile_size=256 is for images"),
        ("comm.timeout=-1", "comm.timeout"),
    ],
)
def test_what_does_not_fit_is_refused(words, sentence, given, tmp_path):
    words = words.replace("SET", f"{tmp_path}/set")
    with pytest.raises(ValueError, match=sentence):
        check_config(composed("predict", *f"{given} {words}".split()))
