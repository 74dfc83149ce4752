"""The options of all commands that write data sets."""

from __future__ import annotations

import argparse

import pytest

from spatialdl.data.options import add_shard_options


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shard_options(parser, ("raw", "jpeg"), "pixels")
    return parser.parse_args(words)


def test_sizes_and_stripes_are_read():
    found = parsed("--codec", "jpeg", "--shard-size", "1M", "--stripe-count", "-1")
    assert (found.codec, found.shard_size) == ("jpeg", 2**20)
    assert (found.stripe_count, found.stripe_size) == (-1, None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--quality", "101"], "'101' is not a JPEG quality from 1 to 100"),
        (["--stripe-count", "0"], "'0' is not 1 to 2000, or -1 for all"),
        (["--stripe-size", "65K"], "'65K' is not a multiple of 64K"),
        (["--codec", "png"], "invalid choice"),
    ],
)
def test_what_cannot_be_written_is_refused(words, text, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert text in capsys.readouterr().err
