"""What the command hands to sbatch, of which here is a stand-in: it keeps the script, or refuses.

The real one is in tests/cluster/test_submitting.py.
"""

from __future__ import annotations

import csv
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl import train
from spatialdl.submitting.runs import SubmittedRun, script

SBATCH = """#!/bin/sh
test ! -e refuse || {
    echo "sbatch: error: invalid partition specified: $(cat refuse)" >&2
    exit 1
}
number=$((12 + $(ls given | wc -l)))
cp "$1" given/$number
echo "Submitted batch job $number"
"""


SITE = Path(__file__).resolve().parents[2] / "examples" / "slurm"


@pytest.fixture
def submitted(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder where sbatch is on the path."""
    monkeypatch.chdir(tmp_path)
    for name in ("given", "bin"):
        (tmp_path / name).mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n")):
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(train, "launched", lambda: None)  # whoever started the tests

    def run(*words: str) -> tuple[int, str, str]:
        flags = [word for word in words if word.startswith("-")]
        overrides = ["launcher=slurm", *(word for word in words if word not in flags)]
        monkeypatch.setattr(sys, "argv", ["train.py", *flags, *overrides])
        code: object = 0
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        if isinstance(code, str):
            return 1, captured.out, f"{code}\n"
        return int(code or 0), captured.out, captured.err

    return run


def given(number: int = 12) -> tuple[set[str], str]:
    """The options of a script, and its commands."""
    text = Path("given", str(number)).read_text()
    options = {line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line}
    return options, text.partition("# command\n")[2]


def words_of(commands: str, **environment: str) -> list[str]:
    """What the script of a job starts there."""
    show = 'exec() { printf "%s\\n" "$@"; }\n'
    shell = ["bash", "-euc", show + commands]
    told = subprocess.run(shell, capture_output=True, text=True, env=environment, check=True)
    return told.stdout.splitlines()


def test_a_script_outlives_the_signal_of_its_ranks(submitted):
    assert submitted("parallel=dp", "hydra.run.dir=out")[0] == 0
    told = "kill -USR1 $$\n" + given()[1].replace("exec ", "echo ")
    done = subprocess.run(["bash", "-euc", told], capture_output=True, text=True, check=False)
    assert done.returncode != 0  # without the trap
    told = given()[1].replace("exec ", "kill -USR1 $$; echo ")
    done = subprocess.run(["bash", "-euc", told], capture_output=True, text=True, check=True)
    assert "spatialdl.submitting.job" in done.stdout


def test_a_sweep_is_an_array_of_what_asks_for_the_same(submitted, tmp_path):
    words = ["parallel=sp+pp", "seed=0,1,2", "launcher.tasks_per_node=2", "launcher.at_once=2"]
    code, out, err = submitted("-m", *words, "data.image_size=[33,47]", "hydra.sweep.dir=sweep")
    assert (code, err) == (0, "")
    options, commands = given()
    assert options >= {"nodes=2", "ntasks=3", "ntasks-per-node=2", "array=0-2%2", "requeue"}
    assert options >= {"signal=USR1@120", "open-mode=append", "job-name=spatialdl"}
    assert f"output={tmp_path}/sweep/slurm/%A_%a.log" in options
    assert not any(option.startswith(("error", "wckey")) for option in options)
    for number in range(3):
        run_dir = tmp_path / "sweep" / str(number)
        assert words_of(commands, SLURM_ARRAY_TASK_ID=str(number)) == [
            *(sys.executable, "-u", "-m", "spatialdl.submitting.job", "--ranks=3", "--requeue=100"),
            *(str(run_dir), "--config-name", "train", "parallel=sp+pp", f"seed={number}"),
            *("data.image_size=[33,47]", "launcher=local"),
            *(f"hydra.run.dir='{run_dir}'", f"hydra.job.id={number}", f"hydra.job.num={number}"),
            "hydra.output_subdir=null",
        ]
        assert list(run_dir.iterdir()) == []  # the run writes there when it has the directory
    with (tmp_path / "sweep" / "slurm" / "jobs.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["job"] for row in rows] == ["12_0", "12_1", "12_2"]
    assert rows[1]["overrides"] == "parallel=sp+pp seed=1 data.image_size=[33,47]"
    assert rows[1]["run directory"] == str(tmp_path / "sweep" / "1")
    assert rows[1]["log"] == str(tmp_path / "sweep" / "slurm" / "12_1.log")
    line = r"^12_2 +3  seed=2 +sweep/2 +sweep/slurm/12_2\.log$"
    assert re.search(line, out, re.MULTILINE), out
    assert "scancel 12" in out
    files = {file.name for file in (tmp_path / "sweep" / "slurm").iterdir()}
    assert files == {"jobs.csv", "12_submission.sh"}  # and nothing pickled


def test_a_run_in_the_directory_of_another_is_submitted_and_changes_nothing_yet(
    submitted, tmp_path
):
    (tmp_path / "out" / ".hydra").mkdir(parents=True)
    files = [tmp_path / "out" / ".hydra" / "config.yaml", tmp_path / "out" / "train.log"]
    for file in files:
        file.write_text("of the first run")
    assert submitted("parallel=dp", "hydra.run.dir=out")[0] == 0
    assert [file.read_text() for file in files] == ["of the first run"] * 2


def test_runs_that_ask_for_something_else_are_arrays_of_their_own(submitted):
    code, out, _ = submitted("-m", "parallel=sp,sp+pp", "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 0
    assert {"ntasks=2", "array=0-1%2"} <= given(12)[0]
    assert {"ntasks=3", "array=0-1%2"} <= given(13)[0]
    assert "parallel=sp+pp" not in given(12)[1]
    assert re.findall(r"^(1\d_\d) .* (sweep/\d) ", out, re.MULTILINE) == [
        *(("12_0", "sweep/0"), ("12_1", "sweep/1"), ("13_0", "sweep/2"), ("13_1", "sweep/3")),
    ]
    assert "squeue -j 12,13; cancel: scancel 12 13" in out


def test_one_run_is_one_job(submitted, tmp_path):
    code, out, err = submitted(
        "parallel=dp", "hydra.run.dir='it\\'s here'", "launcher.setup=[a, b c]"
    )
    assert (code, err) == (0, "")
    options, commands = given()
    assert "ntasks=2" in options
    assert not any(option.startswith("array") for option in options)
    assert f"output='{tmp_path}/it'\"'\"'s here/slurm/%j.log'" in options
    assert "# setup\na\nb c\n" in Path("given", "12").read_text()
    assert words_of(commands)[6] == f"{tmp_path}/it's here"
    assert re.search(r"^12 +2  parallel=dp  it's here +it's here/slurm/12\.log$", out, re.MULTILINE)


def test_where_a_layout_is_found_in_the_job_the_user_says_how_many_ranks(submitted):
    assert submitted("parallel=auto", "parallel.world=5", "hydra.run.dir=run")[0] == 0
    assert "ntasks=5" in given()[0]
    code, _, err = submitted("parallel=auto", "hydra.run.dir=run")
    assert code == 1
    assert err.startswith("error: parallel=auto needs a number of ranks: add parallel.wor")


def test_what_a_site_needs_is_a_file(submitted):
    overrides = ["launcher=site", "launcher.partition=small", "hydra.run.dir=run"]
    assert submitted(f"--config-dir={SITE}", *overrides)[0] == 0
    options, commands = given()
    assert {"partition=small", "time=12:00:00", "gpus-per-task=1", "nodes=1"} <= options
    assert "\nmodule load openmpi\n" in Path("given", "12").read_text()
    words = words_of(commands)
    assert words[words.index("--config-dir") + 1] == str(SITE)
    assert [word for word in words if word.startswith("launcher")] == ["launcher=local"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel=sp", "launcher.nodes=3"], "launcher.nodes=3, but the layout has 2 ranks: use"),
        (["launcher.partion=x"], "launcher.partion is unknown; nearest: launcher.partition"),
        (["launcher=slrum"], "launcher=slrum is unknown; nearest: launcher=slurm"),
        (["launcher=local", "launcher.nodes=2"], "launcher.nodes is a key of launcher=slurm, but"),
        (["debug=fakecomm"], "debug=fakecomm needs no job: omit launcher=slurm"),
        (["data.batch_size=0"], "data.batch_size=0"),
        (["hydra.run.dir='a%j'"], "contains %, which Slurm expands"),
    ],
)
def test_a_mistake_is_told_before_anything_is_submitted(submitted, words, told, tmp_path):
    code, _, err = submitted("hydra.run.dir=run", *words)
    assert code == 1
    assert told in err
    assert err.count("\n") == 1
    assert list((tmp_path / "given").iterdir()) == []


def test_a_mistake_in_one_run_of_a_sweep_keeps_all_back(submitted, tmp_path):
    code, _, err = submitted("-m", "data.batch_size=2,0", "hydra.sweep.dir=sweep")
    assert code == 1
    assert err.endswith("(run launcher=slurm data.batch_size=0 of the sweep; none was submitted)\n")
    assert list((tmp_path / "given").iterdir()) == []


@pytest.mark.parametrize("words", [["hydra.run.dir=run"], ["-m", "hydra.sweep.dir=run"]])
def test_what_sbatch_says_is_passed_on(submitted, words, tmp_path):
    (tmp_path / "refuse").write_text("gup")
    code, _, err = submitted("launcher.partition=gup", *words)
    assert code == 1
    assert (
        err == "error: sbatch rejected the job: sbatch: error: invalid partition specified: gup\n"
    )


def test_inside_of_a_job_none_is_submitted(submitted, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    code, _, err = submitted("hydra.run.dir=run")
    assert code == 1
    assert "but this is inside job 7: omit it to start the ranks in this allocation" in err
    assert list((tmp_path / "given").iterdir()) == []


def test_without_slurm_it_is_told(submitted, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = submitted("hydra.run.dir=run")
    assert code == 1
    assert err.startswith("error: launcher=slurm needs sbatch, which is not on PATH")


def test_words_come_through_the_shell_as_they_are():
    odd = ("a b", "it's", '"$HOME"', "$(exit 1)", "x;y", "ü", "--flag", "[1, 2]", "")
    run = SubmittedRun((), odd, Path("/a b"), 1, 0, (), (), None)
    assert words_of(script([run]))[4:] == ["--ranks=1", "--requeue=0", "/a b", *odd]
