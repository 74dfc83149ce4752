"""No Lustre is here: its table of mounts and its `lfs` are stand-ins, really read and run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter, striping
from spatialdl.data.striping import Striping
from spatialdl.errors import ShardError

TILE = np.zeros((4, 4, 3), np.uint8)


@pytest.fixture
def lustre(tmp_path: Path) -> Path:
    """A table of mounts by which the test's folder is on Lustre."""
    table = tmp_path / "mounts"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / {tmp_path} rw - lustre a rw\n")
    return table


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that records its arguments and the contents of the folder."""
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    said = tmp_path / "asked"
    program.write_text(
        '#!/bin/sh\necho "$@" >> ' + f"{said}\n"
        'for last; do :; done\nfind "$last" -name "*.h5*" >> ' + f"{said}\n"
        '[ "$3" != 77 ] || { echo "lfs: bad  stripe\ncount" >&2; exit 22; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return said


def test_a_folder_on_lustre_is_laid_out(tmp_path: Path, lustre: Path, lfs: Path) -> None:
    for layout, asked in [
        (Striping(4, 2**22), f"setstripe -c 4 -S 4194304 {tmp_path}\n"),
        (Striping(count=-1), f"setstripe -c -1 {tmp_path}\n"),
        (Striping(size=2**16), f"setstripe -S 65536 {tmp_path}\n"),
    ]:
        assert layout.apply(tmp_path, lustre) is None
        assert lfs.read_text() == asked
        lfs.unlink()
    assert Striping().apply(tmp_path, lustre) is None
    assert not lfs.exists()


def test_what_cannot_be_done_is_said(
    tmp_path: Path, lustre: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = Striping(4).apply(tmp_path / "set", lustre)
    assert said == f"stripes were not set: {tmp_path} is on Lustre, but lfs was not found"
    lustre.write_text("1 0 8:1 / / rw - ext4 /dev/sda rw\n")
    said = Striping(4).apply(tmp_path / "set", lustre)
    assert said == f"stripes were not set: {tmp_path} is on ext4, not on Lustre"
    said = Striping(4).apply(tmp_path / "set", tmp_path / "none")
    assert said == f"stripes were not set: {tmp_path} is on an unknown file system, not on Lustre"


def test_no_such_layout() -> None:
    assert [Striping(count).count for count in (1, 2000, -1)] == [1, 2000, -1]
    for count in (0, -2, 2001):
        with pytest.raises(ValueError, match=f"stripe count is {count}, expected 1 to 2000, or -1"):
            Striping(count)
    for size in (0, 2**16 + 1):
        with pytest.raises(ValueError, match=f"stripe size is {size} bytes, expected a multiple"):
            Striping(size=size)


def test_what_lfs_refuses_is_an_error(tmp_path: Path, lustre: Path, lfs: Path) -> None:
    with pytest.raises(ShardError, match=r"lfs setstripe -c 77 .* failed: lfs: bad stripe count"):
        Striping(77).apply(tmp_path, lustre)
    program = tmp_path / "bin" / "lfs"
    program.write_text(  # folders may have names in any encoding
        "#!/bin/sh\nprintf 'lfs: no \\377 here' >&2\nexit 2\n"
    )
    with pytest.raises(ShardError, match="failed: lfs: no \ufffd here"):
        Striping(4).apply(tmp_path, lustre)


def test_a_writer_lays_its_folder_out_before_it_writes(
    tmp_path: Path, lfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striping, "file_system", lambda *_: "lustre")
    with ShardWriter(tmp_path / "set", stripe_count=2, stripe_size=2**20) as writer:
        writer.add(TILE)
        assert lfs.read_text() == f"setstripe -c 2 -S 1048576 {writer.workdir}\n"
    with pytest.raises(ShardError, match="failed"):
        ShardWriter(tmp_path / "other", stripe_count=77)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked", "bin", "set"]


def test_a_writer_elsewhere_says_so_and_goes_on(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="stripes were not set: .* not on Lustre"),
        ShardWriter(tmp_path / "set", stripe_count=2) as writer,
    ):
        writer.add(TILE)
    assert len(ShardDataset(tmp_path / "set")) == 1
