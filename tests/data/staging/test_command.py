from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.data.staging import command
from spatialdl.data.staging.cache import NodeCache
from spatialdl.data.staging.command import main
from tests.data.staging.conftest import flip_a_bit

SCRIPT = Path(__file__).parents[3] / "tools" / "stage_shards.py"


def test_the_script_copies(folder, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            folder,
            "--to",
            tmp_path / "copy",
            "--split",
            "val",
            "--jobs",
            "2",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"1 shard (49.1 kB) verified in {tmp_path}/copy\n"
    assert (tmp_path / "copy" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}/nowhere", "--to", "{}/copy"], 1, "there is no such folder"),
        (["{}/set", "--to", "{}/set"], 1, "is the data set itself"),
        (["{}/set", "--to", "{}/copy", "--split", "test"], 1, "no split 'test'"),
        (["{}/set", "--to", "{}/copy", "--keep-free", "9999T"], 1, ", 0 bytes available"),
        (["{}/set"], 2, "required: --to"),
        (["--to", "{}/copy"], 2, "give either a data set folder to copy, or --clean"),
        (["{}/set", "--clean", "--to", "{}/copy"], 2, "give either"),
        (["{}/set", "--to", "{}/copy", "--jobs", "0"], 2, "'0' is not a whole number"),
        (["{}/set", "--to", "{}/copy", "--keep-free", "much"], 2, "'much' is not a size"),
    ],
)
def test_a_mistake_is_told(arguments, code, text, folder, tmp_path, capsys):
    try:
        found = main([one.format(tmp_path) for one in arguments])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_damage_is_told(folder, tmp_path, capsys):
    flip_a_bit(folder / "shard-00001.h5")
    assert main([str(folder), "--to", str(tmp_path / "copy")]) == 1
    told = capsys.readouterr().err
    assert "error: 1 shard cannot be copied: " in told
    assert "It contains samples 2, 3 (of slide-0)" in told


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (None, 143)])
def test_an_interrupt_says_how_to_go_on(folder, tmp_path, capsys, monkeypatch, error, code):
    def interrupted(*_, **__):
        raise error or command._TerminatedError

    monkeypatch.setattr(command, "copy_folder", interrupted)
    assert main([str(folder), "--to", str(tmp_path / "copy")]) == code
    assert capsys.readouterr().err == "interrupted; run the same command again to resume\n"


def test_what_jobs_left_is_removed(tmp_path, dataset, capsys):
    cache, info = NodeCache(tmp_path), dataset.manifest.shards[0]
    job = cache.join([])
    cache.partial(info).write_bytes((dataset.path / info.file).read_bytes())
    cache.publish(info, job.path)
    assert main(["--clean", "--to", str(tmp_path)]) == 0
    assert len(list(job.path.glob("*.h5"))) == 1, "that job is alive"
    cache.leave(job.path, keep=True)
    job.close()
    capsys.readouterr()
    assert main(["--clean", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"removed 49.1 kB of finished jobs from {tmp_path}\n"
    assert not cache.path.exists()
