from __future__ import annotations

import json
from pathlib import Path

import pytest

from spatialdl.slides.batch.options import SETTINGS, WHOLE_TILE, parsed, settings_of

GIVEN = ["a.svs", "--out", "set", "--mpp", "0.5"]
TILES = [*GIVEN, "--tile-size", "256"]


def test_what_is_not_said() -> None:
    options = parsed(TILES)
    assert options.slides == [Path("a.svs")]
    assert (options.codec, options.quality, options.format, options.jobs) == (
        "raw",
        90,
        "shards",
        1,
    )
    assert (options.min_tissue, options.shard_size, options.overlap) == (0.5, 512 * 2**20, 0)
    assert (options.mag, options.level, options.labels, options.stripes) == (None,) * 4
    flags = (options.dry_run, options.overwrite, options.skip_errors, options.recursive)
    assert flags == (False,) * 4


def test_a_whole_region_has_tiles_to_tell_colours_of() -> None:
    options = parsed([*GIVEN, "--whole", "--stripes", "3"])
    assert (options.whole, options.tile_size, options.stripes) == (True, WHOLE_TILE, 3)


@pytest.mark.parametrize(
    "more",
    [
        ["--stain-normalise", "macenko", "--format", "coords"],
        ["--stain-normalise", "macenko", "--codec", "jpeg-native"],
        ["--whole", "--format", "coords"],
        ["--whole", "--overlap", "8"],
        ["--whole", "--filter", "pen"],
        ["--whole", "--edge", "shift"],
        ["--whole", "--unannotated", "drop", "--annotations", "drawn"],
        ["--edge", "pad", "--format", "coords"],
        ["--edge", "pad", "--codec", "jpeg-native"],
        ["--edge", "shift", "--codec", "jpeg-native"],
        ["--stripes", "2"],
    ],
)
def test_options_that_do_not_go_together(more: list[str]) -> None:
    given = GIVEN if "--whole" in more else TILES
    with pytest.raises(ValueError, match=r"cannot be combined|add --whole") as caught:
        parsed([*given, *more])
    assert more[0] in str(caught.value)
    parsed([*given, *more[2:]] if more[0] != "--whole" else [*given, "--whole"])


def test_tiles_outside_of_annotations_need_annotations() -> None:
    with pytest.raises(ValueError, match="requires --annotations"):
        parsed([*TILES, "--unannotated", "background"])
    drawn = [*TILES, "--annotations", "drawn"]
    plain, drop, background = (
        settings_of(parsed([*drawn, *more]), ["a"])
        for more in ([], ["--unannotated", "drop"], ["--unannotated", "background"])
    )
    assert plain == drop  # so that data sets are added to as before
    assert background == {**plain, "unannotated": "background"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--jobs", "0"], "'0' is not a whole number of at least 1"),
        (["--jobs", "-1"], "'-1' is not a whole number"),
        (["--jobs", "²"], "'²' is not a whole number"),
        (["--quality", "0"], "'0' is not a JPEG quality from 1 to 100"),
        (["--quality", "101"], "'101' is not a JPEG quality"),
        (["--codec", "png"], "invalid choice: 'png'"),
        (["--format", "zarr"], "invalid choice: 'zarr'"),
        (["--shard-size", "1P"], "'1P' is not a size such as 256M or 1G"),
        (["--whole"], "not allowed with argument --tile-size"),
        (["--filter", "green"], "green"),
    ],
)
def test_mistakes(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed([*TILES, *more])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("3k", 3072), ("2M", 2**21), ("1GiB", 2**30), (" 5 KB ", 5120)]
)
def test_sizes(text: str, size: int) -> None:
    assert parsed([*TILES, "--shard-size", text]).shard_size == size


def test_settings_survive_json_and_tell_what_decides_on_tiles() -> None:
    settings = settings_of(parsed([*TILES, "--filter", "pen,blur=0.5"]), ["a", "b"])
    assert json.loads(json.dumps(settings)) == settings
    assert set(SETTINGS) < set(settings)
    assert settings["classes"] == ["a", "b"]
    others = [
        ["--codec", "jpeg"],
        ["--min-tissue", "0.4"],
        ["--overlap", "8"],
        ["--filter", "pen"],
        ["--shard-size", "1M"],
        ["--mask-dir", "."],
        ["--annotations", "."],
        ["--stain-normalise", "macenko"],
        ["--format", "coords"],
        ["--slide-mpp", "0.5"],
        ["--background", "dark"],
    ]
    found = [settings_of(parsed([*TILES, *more]), []) for more in others]
    assert all(one != two for one in found for two in found if one is not two)
    # who does the work, and where, does not matter
    for more in (["--jobs", "3"], ["--overwrite"], ["--skip-errors"], ["--recursive"]):
        assert settings_of(parsed([*TILES, *more]), []) == settings_of(parsed(TILES), [])
