"""What the command hands to sbatch, of which here is a stand-in: it keeps the script, or refuses.

The real one is in tests/cluster/test_submitting.py.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import DictConfig

from spatialdl import train
from spatialdl.cli.slurm_job import _parser, end_markers, job_id, requeue_obstacle
from spatialdl.cli.slurm_runs import SubmittedRun, on_nodes, resources, script
from tests.composing import composed
from tests.inference.evaluating.cases import read_rows

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
def submitted(tmp_path, monkeypatch, run_main):
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

    def run(*words: str) -> tuple[int, str]:
        flags = [word for word in words if word.startswith("-")]
        overrides = ["launcher=slurm", *(word for word in words if word not in flags)]
        return run_main(train.main, *flags, *overrides)

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
    assert "spatialdl.cli.slurm_job" in done.stdout


def test_a_sweep_is_an_array_of_what_asks_for_the_same(submitted, tmp_path):
    words = ["parallel=sp+pp", "seed=0,1,2", "launcher.tasks_per_node=2", "launcher.at_once=2"]
    code, out = submitted("-m", *words, "data.image_size=[33,47]", "hydra.sweep.dir=sweep")
    assert code == 0, out
    options, commands = given()
    assert options >= {"nodes=2", "ntasks=3", "ntasks-per-node=2", "array=0-2%2", "requeue"}
    assert options >= {"signal=USR1@120", "open-mode=append", "job-name=spatialdl"}
    assert f"output={tmp_path}/sweep/slurm/%A_%a.log" in options
    assert not any(option.startswith(("error", "wckey")) for option in options)
    for number in range(3):
        run_dir = tmp_path / "sweep" / str(number)
        assert words_of(commands, SLURM_ARRAY_TASK_ID=str(number)) == [
            *(sys.executable, "-u", "-m", "spatialdl.cli.slurm_job", "--ranks=3", "--requeue=100"),
            *(str(run_dir), "--config-name", "train", "parallel=sp+pp", f"seed={number}"),
            *("data.image_size=[33,47]", "launcher=local"),
            *(f"hydra.run.dir='{run_dir}'", f"hydra.job.id={number}", f"hydra.job.num={number}"),
            "hydra.output_subdir=null",
        ]
        assert list(run_dir.iterdir()) == []  # the run writes there when it has the directory
    rows = read_rows(tmp_path / "sweep" / "slurm" / "jobs.csv")
    assert [row["job"] for row in rows] == ["12_0", "12_1", "12_2"]
    assert rows[1]["overrides"] == "parallel=sp+pp seed=1 data.image_size=[33,47]"
    assert rows[1]["run directory"] == str(tmp_path / "sweep" / "1")
    assert rows[1]["log"] == str(tmp_path / "sweep" / "slurm" / "12_1.log")
    line = r"^12_2 +3  seed=2 +sweep/2 +sweep/slurm/12_2\.log$"
    assert re.search(line, out, re.MULTILINE), out
    assert "scancel 12" in out
    files = {file.name for file in (tmp_path / "sweep" / "slurm").iterdir()}
    assert files == {"jobs.csv", "12_submission.sh"}  # and nothing pickled


def test_runs_that_ask_for_something_else_are_arrays_of_their_own(submitted):
    code, out = submitted("-m", "parallel=sp,sp+pp", "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 0
    assert {"ntasks=2", "array=0-1%2"} <= given(12)[0]
    assert {"ntasks=3", "array=0-1%2"} <= given(13)[0]
    assert "parallel=sp+pp" not in given(12)[1]
    assert re.findall(r"^(1\d_\d) .* (sweep/\d) ", out, re.MULTILINE) == [
        *(("12_0", "sweep/0"), ("12_1", "sweep/1"), ("13_0", "sweep/2"), ("13_1", "sweep/3")),
    ]
    assert "squeue -j 12,13; cancel: scancel 12 13" in out


def test_one_run_is_one_job(submitted, tmp_path):
    code, out = submitted("parallel=dp", "hydra.run.dir='it\\'s here'", "launcher.setup=[a, b c]")
    assert code == 0, out
    options, commands = given()
    assert "ntasks=2" in options
    assert not any(option.startswith("array") for option in options)
    assert f"output='{tmp_path}/it'\"'\"'s here/slurm/%j.log'" in options
    assert "# setup\na\nb c\n" in Path("given", "12").read_text()
    assert words_of(commands)[6] == f"{tmp_path}/it's here"
    # the run may wait for the directory of another, and changes nothing there yet
    assert [one.name for one in Path("it's here").iterdir()] == ["slurm"]
    assert re.search(r"^12 +2  parallel=dp  it's here +it's here/slurm/12\.log$", out, re.MULTILINE)


def test_where_a_layout_is_found_in_the_job_the_user_says_how_many_ranks(submitted):
    assert submitted("parallel=auto", "parallel.world=5", "hydra.run.dir=run")[0] == 0
    assert "ntasks=5" in given()[0]


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
        (["parallel=auto"], "parallel=auto needs a number of ranks: add parallel.wor"),
        (["launcher.partion=x"], "launcher.partion is unknown; nearest: launcher.partition"),
        (["launcher=slrum"], "launcher=slrum is unknown; nearest: launcher=slurm"),
        (["launcher=local", "launcher.nodes=2"], "launcher.nodes is a key of launcher=slurm, but"),
        (["debug=fakecomm"], "debug=fakecomm needs no job: omit launcher=slurm"),
        (["data.batch_size=0"], "data.batch_size=0"),
        (["hydra.run.dir='a%j'"], "contains %, which Slurm expands"),
        (["-m", "data.batch_size=2,0"], "data.batch_size=0 of the sweep; none was submitted)\n"),
    ],
)
def test_a_mistake_is_told_before_anything_is_submitted(submitted, words, told, tmp_path):
    code, err = submitted("hydra.run.dir=run", *words)
    assert code == 1
    assert told in err
    assert err.count("\n") == 1
    assert list((tmp_path / "given").iterdir()) == []


@pytest.mark.parametrize("words", [["hydra.run.dir=run"], ["-m", "hydra.sweep.dir=run"]])
def test_what_sbatch_says_is_passed_on(submitted, words, tmp_path):
    (tmp_path / "refuse").write_text("gup")
    code, err = submitted("launcher.partition=gup", *words)
    assert code == 1
    said = "sbatch: error: invalid partition specified: gup\n"
    assert err == f"error: sbatch rejected the job: {said}"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SLURM_JOB_ID", "7", "but this is inside job 7: omit it to start the ranks in"),
        ("PATH", "/nowhere", "error: launcher=slurm needs sbatch, which is not on PATH"),
    ],
)
def test_where_no_job_can_be_submitted_it_is_told(
    submitted, name, value, told, monkeypatch, tmp_path
):
    monkeypatch.setenv(name, value)
    code, err = submitted("hydra.run.dir=run")
    assert code == 1
    assert told in err
    assert list((tmp_path / "given").iterdir()) == []


def test_words_come_through_the_shell_as_they_are():
    odd = ("a b", "it's", '"$HOME"', "$(exit 1)", "x;y", "ü", "--flag", "[1, 2]", "")
    run = SubmittedRun((), odd, Path("/a b"), 1, 0, (), (), None)
    assert words_of(script([run]))[4:] == ["--ranks=1", "--requeue=0", "/a b", *odd]


def launcher(*overrides: str) -> DictConfig:
    return composed("train", "launcher=slurm", *overrides).launcher


@pytest.mark.parametrize(
    ("ranks", "nodes", "each", "expected"),
    [
        (3, None, None, (None, None)),
        (8, None, 4, (2, 4)),
        (9, None, 4, (3, 4)),
        (3, None, 4, (1, 3)),
        (3, 2, None, (2, 2)),
        (1, 1, None, (1, 1)),
        (7, 2, 4, (2, 4)),
        (2, 2, 4, (2, 2)),
        (2, 3, None, r"launcher\.nodes=3, but the layout has 2 ranks: use at most 2"),
        (1, 2, 1, r"launcher\.nodes=2, but the layout has 1 rank: use at most 1"),
        (9, 2, 4, r"has 9 ranks, but launcher\.nodes=2 x launcher\.tasks_per_node=4"),
    ],
)
def test_ranks_share_nodes(ranks, nodes, each, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            on_nodes(ranks, nodes, each)
    else:
        assert on_nodes(ranks, nodes, each) == expected


def test_what_is_not_said_is_left_to_the_site():
    assert resources(launcher(), 3) == (
        *(("cpus_per_task", 1), ("ntasks", 3), ("requeue", True)),
        *(("signal", "USR1@120"), ("time", "1:00:00")),
    )


def test_every_setting_is_an_option():
    words = ["partition=gpu", "account=me", "time=90", "tasks_per_node=2", "gpus_per_task=1"]
    words += ["cpus_per_task=7", "signal=30", "requeue=0"]
    words += ["options=['--qos=long', '--mem-per-cpu=2G', --exclusive]"]
    assert dict(resources(launcher(*(f"launcher.{word}" for word in words)), 6)) == {
        **{"partition": "gpu", "account": "me", "time": 90, "nodes": 3, "ntasks": 6},
        **{"ntasks_per_node": 2, "gpus_per_task": 1, "cpus_per_task": 7, "signal": "USR1@30"},
        **{"no_requeue": True, "qos": "long", "mem_per_cpu": "2G", "exclusive": True},
    }


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nodes=0", "launcher.nodes=0 must be at least 1, or null"),
        ("gpus_per_task=true", "launcher.gpus_per_task=True must be at least 1, or null"),
        ("signal=null", "launcher.signal=None must be at least 1"),
        ("requeue=-1", "launcher.requeue=-1 must be at least 0"),
        ("time=[1]", "launcher.time=[1] must be a word or a number"),
        ("partition='a\nb'", r"launcher.partition='a\nb' must be one line"),
        ("setup=module", "launcher.setup=module must be a list of shell lines"),
        ("options=long", "launcher.options=long must be a list of options such as --qos=long"),
        ("options=[{qos: a}]", "launcher.options=[{'qos': 'a'}] must be a list of options"),
        ("options=[-p x]", "launcher.options has '-p x': write options as --qos=long"),
        ("options=['--qos=a\nb']", r"launcher.options has '--qos=a\nb': write options as"),
        ("options=['--ntasks=3']", "launcher.options has --ntasks=3: omit it, the layout"),
        ("options=['--time=3']", "launcher.options has --time=3: omit it, launcher.time sets it"),
    ],
)
def test_what_is_no_such_thing_is_told(word, told):
    with pytest.raises(ValueError, match="launcher") as error:
        resources(launcher(f"launcher.{word}"), 3)
    assert str(error.value).startswith(told)


def test_one_of_an_array_is_not_all_of_it():
    alone = {"SLURM_JOB_ID": "12"}
    assert job_id(alone) == "12"
    last = {**alone, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert job_id(last) == "12_3"


def test_a_run_that_ended_has_left_something_new(tmp_path):
    seen = [end_markers(tmp_path)]
    for name in ("stopped.json", "summary.json", "stopped.json"):
        (tmp_path / "new").write_text("{}")
        (tmp_path / "new").replace(tmp_path / name)
        seen.append(end_markers(tmp_path))
    assert seen[0] == []
    assert all(one != other for one, other in pairwise(seen))
    (tmp_path / "metrics.csv").touch()
    assert end_markers(tmp_path) == seen[-1]


@pytest.mark.parametrize(
    ("saved", "restarts", "reason"),
    [
        (20, 0, None),
        (20, 1, None),
        (20, 2, "launcher.requeue=2 reached; resume with ckpt_path=latest"),
        (
            None,
            0,
            "there is no checkpoint, it would restart from scratch (trainer.checkpoint.keep=0)",
        ),
    ],
)
def test_a_job_goes_on_if_there_is_something_to_go_on_from(saved, restarts, reason):
    assert requeue_obstacle({"step": 20, "checkpoint": saved}, restarts, 2) == reason


def test_the_words_of_the_ranks_are_left_as_they_are():
    words = ["--config-name", "train", "--ranks=7", "seed=1"]
    options = _parser().parse_args(["--ranks=3", "--requeue=5", "my run", *words])
    assert (options.ranks, options.requeue, options.run_dir) == (3, 5, Path("my run"))
    assert options.words == words
