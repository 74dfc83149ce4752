from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from spatialdl.common.text import (
    aligned,
    counted,
    fitted,
    positive_int,
    readable_bytes,
    size_in_bytes,
    width,
    without_passwords,
)


def test_columns_are_straight() -> None:
    assert aligned([("name", "n", ""), ("a", "10", "ok"), ("é", "5", "")], left=(0, 2)) == [
        "name   n",
        "a     10  ok",
        "é      5",
    ]
    rows = aligned([("a\u0301b", "1"), ("切片", "1"), ("long", "1")])
    assert [width(row) for row in rows] == [7, 7, 7]
    assert aligned([]) == []


@pytest.mark.parametrize("name", ["TCGA-" + "x" * 90 + "-DX1", "切片" * 40, "a\u0301" * 99])
def test_a_long_text_keeps_its_ends(name: str) -> None:
    short = fitted(name, 40)
    assert 38 <= width(short) <= 40
    head, tail = short.split("…")
    assert head
    assert tail
    assert name.startswith(head)
    assert name.endswith(tail)
    assert fitted("a\nb\tc", 40) == "a?b?c"
    assert fitted("as it is", 8) == "as it is"


def test_numbers() -> None:
    assert counted(1, "tile") == "1 tile"
    assert counted(2000, "tile") == "2,000 tiles"
    sizes = (0, 1, 999, 1500, 999_949, 999_999, 23 * 10**9)
    assert [readable_bytes(n) for n in sizes] == [
        *("0 bytes", "1 byte", "999 bytes", "1.5 kB", "999.9 kB", "1.0 MB", "23.0 GB")
    ]


def test_sizes() -> None:
    texts = ("1", "64K", "256m", "1 G", "2TB", "2GiB", "5B")
    assert list(map(size_in_bytes, texts)) == [1, 2**16, 2**28, 2**30, 2**41, 2**31, 5]


def test_addresses_are_told_without_passwords() -> None:
    given = {
        "uri": ["postgresql://me:p@ss%2Fword@host:5/db", "sqlite:////tmp/a@b.db", 3, None],
        "text": "see https://key@here.org/a and me@there.org, not https://here.org/me@b",
    }
    assert without_passwords(given) == {
        "uri": ["postgresql://***@host:5/db", "sqlite:////tmp/a@b.db", 3, None],
        "text": "see https://***@here.org/a and me@there.org, not https://here.org/me@b",
    }


@pytest.mark.parametrize(
    ("read", "words", "said"),
    [
        (
            size_in_bytes,
            ("", "0", "-1", "1.5G", "1X", "lots", "٣M"),
            "is not a size such as 256M or",
        ),
        (positive_int, ("0", "-1", "1.5", "two", "²", ""), "is not a whole number of at least 1"),
    ],
)
def test_what_is_no_number_is_refused(read, words, said) -> None:
    for wrong in words:
        with pytest.raises(ArgumentTypeError, match=said):
            read(wrong)
    assert positive_int("12") == 12
