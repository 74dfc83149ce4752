from __future__ import annotations

import pytest

from spatialdl.data.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64K", 2**16), ("256m", 2**28), ("1 G", 2**30), ("2GiB", 2**31), ("5B", 5)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5G", "1T", "lots", "٣M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 256M or 1G"):
        parse_bytes(text)
