from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.errors import ShardError
from spatialdl.slides.inspecting import verify


def test_a_whole_data_set_is_as_written(data_set: Path) -> None:
    found = verify(data_set)
    assert found
    assert found.problems == ()
    size = sum(path.stat().st_size for path in data_set.glob("*.h5"))
    assert (found.shards, found.bytes) == (3, size)
    assert str(found).startswith(f"{data_set}: 3 shards, ")
    assert str(found).endswith("all as they were written")


def test_every_bad_shard_is_named(data_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = sorted(data_set.glob("*.h5"))
    first.unlink()
    with second.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))  # one bit of it
    with third.open("ab") as file:
        file.write(b"more")
    found = verify(data_set, progress=False)
    assert not found
    assert [problem.split(":")[0] for problem in found.problems] == [
        *("shard-00000.h5", "shard-00001.h5", "shard-00002.h5")
    ]
    says = ("No such file", "SHA-256", "it was cut or replaced")
    assert all(what in problem for what, problem in zip(says, found.problems, strict=True))
    assert "3 of 3 shards not as written" in str(found)
    assert all(problem in str(found) for problem in found.problems)
    assert capsys.readouterr().err == ""


def test_a_folder_without_manifest_is_refused(tmp_path: Path, data_set: Path) -> None:
    for path, says in [
        (tmp_path, "no manifest.json"),
        (data_set / "shard-00000.h5", "give the folder itself"),
        (tmp_path / "none", "no such folder"),
    ]:
        with pytest.raises(ShardError, match=says):
            verify(path)
