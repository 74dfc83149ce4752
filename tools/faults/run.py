"""Faults that the tests must notice: drawn over the whole package, planted one at a time.

    python tools/faults/run.py draw          # faults.json anew: which faults there are
    python tools/faults/run.py reach         # the whole suite once: which test comes to which fault
    python tools/faults/run.py try           # each fault against the tests that come to it
    python tools/faults/run.py compare A B   # two results: what A noticed and B did not

`make mutants` is reach, if it has not been done, and try. Both may be stopped and go on where they
were. Sources are never changed: `hook.py` plants a fault while a module is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from sites import TALKING, Site, sites  # noqa: E402

COUNT, OF_RANKS = 120, 30
SEED = 20261128
OF_TALK = ("exchange", "reduction", "box", "axes")
PARTS = ("test-serial", "test-mpi", "test-docs", "test-device")
SKIPPED = ("conf", "models")
"""Folders without faults: configuration, plain networks."""


def draw(root: Path, count: int, of_ranks: int, seed: int, within: str = "") -> list[Site]:
    """Faults at random statements, one for each folder at least, and some where ranks talk."""
    rng = random.Random(seed)
    everything: dict[str, list[list[Site]]] = defaultdict(list)
    for file in sorted((root / "spatialdl").rglob("*.py")):
        parts = file.relative_to(root / "spatialdl").parts
        if parts[0] in SKIPPED or not str(file.relative_to(root)).startswith(within):
            continue
        if statements := [found for found in sites(root, file) if found]:
            everything[parts[0]] += statements
    taken: dict[Site, None] = {}
    for folder in sorted(everything):
        taken[rng.choice(rng.choice(everything[folder]))] = None
    all_of_them = [found for folder in sorted(everything) for found in everything[folder]]
    while len(taken) < count - of_ranks:
        taken[rng.choice(rng.choice(all_of_them))] = None
    talk = [
        site
        for folder in TALKING
        for found in everything.get(folder, ())
        for site in found
        if site.operator in OF_TALK
    ]
    of_kind = {kind: [site for site in talk if site.operator == kind] for kind in OF_TALK}
    while talk and len(taken) < count:
        for kind in OF_TALK:
            if of_kind[kind] and len(taken) < count:
                taken[rng.choice(of_kind[kind])] = None
    return list(taken)


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def environment(root: Path, plan: dict[str, Any], at: Path) -> dict[str, str]:
    """Of processes in which the plan holds."""
    at.write_text(json.dumps(plan))
    hook = Path(sysconfig.get_path("purelib")) / "spatialdl_faults.pth"
    line = (
        "import os; os.environ.get('SPATIALDL_FAULTS') and exec("
        "open(os.environ['SPATIALDL_FAULTS_TOOLS'] + '/hook.py').read(), {'__name__': 'hook'})\n"
    )
    if not hook.exists() or hook.read_text() != line:  # never half written while a Python starts
        hook.write_text(line)
    more = {"SPATIALDL_FAULTS": str(at), "SPATIALDL_FAULTS_TOOLS": str(HERE)}
    more |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return {**os.environ, **more}


def reach(root: Path, state: Path, faults: list[dict[str, Any]], parts: list[str]) -> None:
    """Run the suite with a probe at each fault."""
    folder = state / "reached"
    folder.mkdir(parents=True, exist_ok=True)
    modules: dict[str, list[Any]] = defaultdict(list)
    for number, fault in enumerate(faults):
        for site in fault.get("sites", ()):
            modules[module_of(site["file"])].append([number, site])
    plan = {"modules": modules, "replaced": {}, "record": str(folder)}
    env = environment(root, plan, state / "probes.json")
    env |= {"PYTEST_ADDOPTS": "-p reached_plugin", "SPATIALDL_FAULTS_RECORD": str(folder)}
    for part in parts:
        done = state / f"{part.replace('/', '-')}.done"
        if not done.exists():
            with done.with_suffix(".log").open("w") as log:
                begin = time.time()
                command = command_of(part)
                subprocess.run(command, cwd=root, env=env, stdout=log, stderr=log, check=False)
            done.write_text(f"{time.time() - begin:.0f} s\n")


def command_of(part: str) -> list[str]:
    """What runs a part: a target of the Makefile, or tests by paths, as ``4:tests/mpi/comm``."""
    if "tests/" not in part:
        return ["make", "--keep-going", part]
    ranks, _, paths = part.rpartition(":")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    if ranks:
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        return [mpiexec, "--oversubscribe", "-n", ranks, *command, *paths.split()]
    return [*command, *paths.split()]


def reached(state: Path) -> tuple[dict[int, set[tuple[str, str]]], dict[tuple[str, str], float]]:
    """By fault: the (part, test) that come to it; seconds of each that passed."""
    tests: dict[int, set[tuple[str, str]]] = defaultdict(set)
    seconds: dict[tuple[str, str], float] = {}
    for file in (state / "reached").glob("*.took"):
        part = file.name.rpartition("-")[0].replace("_", " ")
        for test, (taken, outcome) in json.loads(file.read_text()).items():
            if outcome == "passed":
                seconds[part, test] = min(taken, seconds.get((part, test), taken))
    for file in (state / "reached").glob("*.reached"):
        for line in file.read_text().splitlines():
            if not line.endswith("]"):  # of a process that was killed, or whose disk was full
                continue
            number, part, test = json.loads(line)
            if (part or "0", test) in seconds:
                tests[number].add((part or "0", test))
    return tests, seconds


def plan_of(number: int, fault: dict[str, Any], root: Path, state: Path) -> dict[str, Any]:
    """What plants a fault: a site, or a file of sources with texts replaced.

    Raises:
        LookupError: the place is no longer in the sources.
    """
    modules: dict[str, list[Any]] = {}
    replaced: dict[str, str] = {}
    if "texts" in fault:
        for text, (file, old, new) in enumerate(fault["texts"]):
            module = module_of(file)
            source = Path(replaced.get(module, root / file)).read_text()
            if source.count(old) != 1:
                raise LookupError(f"{file} has the text to replace {source.count(old)} times")
            target = state / f"replaced-{number}-{text}.py"
            target.write_text(source.replace(old, new))
            replaced[module] = str(target)
    else:
        modules = {module_of(site["file"]): [[0, site]] for site in fault["sites"]}
    return {"modules": modules, "replaced": replaced, "record": None}


def batches(
    tests: set[tuple[str, str]], seconds: dict[tuple[str, str], float], fault: dict[str, Any]
) -> Iterator[tuple[str, list[str]]]:
    """(part, tests) to run one after another: near and quick ones first, serial before ranks."""
    words = set(fault["name"].split(":")[0].removesuffix(".py").split("/")[1:])

    def order(item: tuple[str, str]) -> tuple[float, str]:
        _, test = item
        near = len(words & set(test.split("::")[0].replace("test_", "")[:-3].split("/")))
        return seconds.get(item, 5.0) / (1 + 4 * near), test

    parts: dict[str, list[str]] = defaultdict(list)
    for part, test in sorted(tests, key=order):
        parts[part].append(test)
    for size in (25, 200):
        for part in sorted(parts):
            chosen, parts[part] = parts[part][:size], parts[part][size:]
            if chosen:
                yield part, chosen


def run_batch(
    root: Path, env: dict[str, str], part: str, tests: list[str], limit: float, log: Path
) -> str:
    """How pytest ended: "passed", or why it noticed something."""
    listed = log.with_suffix(".tests")
    listed.write_text("\n".join(tests))
    python = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    python += ["-o", "addopts=--strict-markers --import-mode=importlib", "-o", "timeout=100"]
    command = [*python, f"@{listed}"]
    ranks, *device = part.split(" ")
    if ranks == "tiles":  # virtual ones, in a single process
        env = {**env, "SPATIALDL_GRIDS": "tiles"}
    elif ranks != "0":
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        command = [mpiexec, "--oversubscribe", "-n", ranks, *command]
    if device:
        env = {
            **env,
            "SPATIALDL_DEVICE": device[0],
            "SPATIALDL_DEVICE_PATH": device[-1] if len(device) > 1 else "",
        }
        env |= {"SPATIALDL_DEVICES": "1"} if device[-1] in ("host", "mpi") else {}
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=root, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            return "out of time"
    if code == 4 and "ERROR: not found" not in log.read_text(errors="replace"):
        return "noticed, cannot be imported"
    # 4: a test is not there; 5: none was run
    return "passed" if code in (0, 4, 5) else f"noticed, exit {code}"


def try_one(
    number: int,
    fault: dict[str, Any],
    todo: set[tuple[str, str]],
    seconds: dict[tuple[str, str], float],
    root: Path,
    state: Path,
    budget: float,
) -> str:
    """Plant one fault, and run its tests until one fails: what came of it."""
    log = state / f"fault-{number}.log"
    log.unlink(missing_ok=True)
    verdict, begin = "no test comes to it", time.time()
    try:
        env = environment(root, plan_of(number, fault, root, state), log.with_suffix(".json"))
    except LookupError as error:
        return f"gone: {error}"
    for part, batch in batches(todo, seconds, fault):
        expected = sum(seconds.get((part, test), 5.0) for test in batch)
        left = budget - (time.time() - begin)
        if left < 20:
            verdict = "not noticed in time"
            break
        # a test that hangs has noticed: it never does without the fault
        needed = 180 + 4 * expected  # ranks import for a minute where others do so, too
        limit = min(needed, max(left, 60))
        verdict = run_batch(root, env, part, batch, limit, log)
        if verdict == "out of time" and limit >= needed:
            verdict = "noticed, hangs"
        if verdict == "passed":
            verdict = "not noticed"
        if verdict.startswith("noticed"):
            verdict += f" ({part})"
            break
    return f"{verdict}; {time.time() - begin:.0f} s"


def try_all(
    root: Path,
    state: Path,
    faults: list[dict[str, Any]],
    result: Path,
    budget: float,
    at_once: int,
) -> None:
    """Plant each fault that has no result yet; a result is written after each."""
    results = json.loads(result.read_text()) if result.exists() else {}
    tests, seconds = reached(state)
    with ThreadPoolExecutor(at_once) as pool:
        runs = {}
        for number, fault in enumerate(faults):
            if fault["name"] in results:
                continue
            todo = tests[number]
            if "tests" in fault:  # a bug of the past names the tests that notice it
                todo = {(fault["part"], test) for test in fault["tests"]}
            given = (number, fault, todo, seconds, root, state, budget)
            runs[pool.submit(try_one, *given)] = fault["name"]
        for run in as_completed(runs):
            results[runs[run]] = run.result()
            print(f"{len(results)}/{len(faults)} {runs[run][:90]}: {run.result()}", flush=True)
            result.write_text(json.dumps(results, indent=1) + "\n")
    kinds = Counter(text.split(",")[0].split(";")[0].split(":")[0] for text in results.values())
    print("\n".join(f"{count:5} {kind}" for kind, count in kinds.most_common()))


def compare(before: Path, after: Path) -> None:
    """What the one noticed and the other did not."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    noticed = [name for name, text in old.items() if text.startswith("noticed")]
    still = [name for name in noticed if new.get(name, "").startswith("noticed")]
    for name in sorted(set(noticed) - set(still)):
        print(f"{name}: {new.get(name, 'not tried')}")
    share = len(still) / max(1, len(noticed))
    print(f"{len(still)} of {len(noticed)} noticed, {share:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("draw", "reach", "try", "compare"))
    parser.add_argument("results", nargs="*", type=Path, help="two files to compare")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout to test")
    parser.add_argument("--faults", type=Path, default=HERE / "faults.json")
    parser.add_argument("--state", type=Path, help="folder of the records (ROOT/.faults)")
    parser.add_argument("--result", type=Path, help="file of verdicts (STATE/noticed.json)")
    parser.add_argument("--within", default="", help="draw: only files that begin so")
    parser.add_argument("--count", type=int, default=COUNT, help="draw: number of faults")
    parser.add_argument(
        "--ranks", type=int, default=OF_RANKS, help="draw: of these where ranks talk"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--budget", type=float, default=400, help="try: seconds for each fault")
    parser.add_argument("--at-once", type=int, default=2, help="try: faults at the same time")
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help="reach: targets of the Makefile, or paths of tests, as 4:tests/mpi/comm",
    )
    options = parser.parse_args()
    root = options.root.resolve()
    state = options.state or root / ".faults"
    state.mkdir(exist_ok=True)
    if options.what == "compare":
        return compare(*options.results)
    if options.what == "draw":
        drawn = draw(root, options.count, options.ranks, options.seed, options.within)
        rows = [{"name": site.name, "sites": [site.as_dict()]} for site in drawn]
        options.faults.write_text(json.dumps(rows, indent=1) + "\n")
        print("\n".join(row["name"] for row in rows))
        return None
    faults = json.loads(options.faults.read_text())
    if options.what == "reach":
        return reach(root, state, faults, options.parts.split(","))
    result = options.result or state / "noticed.json"
    return try_all(root, state, faults, result, options.budget, options.at_once)


if __name__ == "__main__":
    main()
