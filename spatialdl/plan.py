"""The planning command: ``python -m spatialdl.plan key=value ... world=64``.

Accepts every key of ``spatialdl.train``, runs no training, and lists the layouts that fit; for a
given layout it prints the cost.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spatialdl.cli.start import (
    check_command_line,
    composed_job,
    hydra_job,
    run_directory,
    run_single_process,
)
from spatialdl.common.configuring.help import print_help, wants_help
from spatialdl.common.configuring.overrides import flags_of
from spatialdl.common.configuring.own_keys import fit_model_keys, rewritten

if TYPE_CHECKING:
    from spatialdl.planning.search import Row

log = logging.getLogger("spatialdl.plan")


def main() -> None:
    """Run the planning command."""
    flags = {"--calibrate": "calibrate=true"}
    sys.argv[1:] = [flags.get(argument, rewritten(argument)) for argument in sys.argv[1:]]
    if wants_help(sys.argv[1:]):
        print_help("plan", sys.argv[1:])
        return
    run_single_process(_run_alone)


def _run_alone() -> None:
    check_command_line(flags_of(sys.argv[1:], "plan"), "plan")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://spatialdl.conf", config_name="plan")
def _hydra_main(config: DictConfig) -> None:
    from spatialdl.comm.single_process import SingleProcess

    overrides = list(HydraConfig.get().overrides.task)
    with (
        hydra_job(),
        run_directory(SingleProcess(), composed_job(), config, "plan") as (agreed, folder),
    ):
        plan(agreed, overrides, folder)


def plan(config: DictConfig, overrides: Sequence[str], folder: Path) -> list[Row]:
    """Print the table, and the first layout.

    Raises:
        ValueError: if the configuration is inconsistent, or no layout fits.
    """
    from spatialdl.planning.calibrate import measured
    from spatialdl.planning.search import (
        describe_stages,
        draw_timeline,
        limit,
        named,
        search,
        table,
    )
    from spatialdl.planning.setup import MEASURED, check_first, cluster_named, job_of

    is_named = config.parallel.name not in ("none", "auto")
    if is_named and OmegaConf.is_missing(config, "world"):
        config = config.copy()
        config.world = None  # computed from the layout
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)} has no value: add {missing[0]}=...")
    if config.launcher.name != "local":
        raise ValueError(f"launcher={config.launcher.name} submits runs, but planning has no run")
    if config.parallel.name == "auto":
        raise ValueError("parallel=auto is for training: omit it to search for a layout")
    fit_model_keys(config, overrides)
    again = bool(config.calibrate)
    check_first(config, config.cluster.get("name") == MEASURED and (again or measured() is None))
    cluster = cluster_named(config.cluster, again)
    job = job_of(config, cluster)
    if is_named:
        rows = [named(job, cluster, config.parallel, overrides, config.world)]
        memory = limit(config.device_memory_gb, cluster, rows[0].prediction.placement.world_size)
    else:
        memory = limit(config.device_memory_gb, cluster, config.world)
        rows = search(job, cluster, config.parallel, config.world, memory)
    print(table(rows[: int(config.rows)], job, cluster, len(rows)))
    if memory is not None and rows[0].memory > memory:
        print(f"\nnote: does not fit: a rank has {memory / 1e9:.2f} GB")
    _write(rows[: int(config.rows)], folder)
    draw_timeline(rows[0], folder / "timeline.png")
    print("\n".join(["", "the first layout:", "", *describe_stages(rows[0], job)]))
    print(f"\nwritten: {folder}/plan.json and timeline.png")
    return rows


def _write(rows: Sequence[Row], folder: Path) -> None:
    """Write the rows as JSON, with the layouts' overrides for ``spatialdl.train``."""
    listed = [
        {
            "overrides": row.layout.overrides(),
            "seconds": row.prediction.seconds,
            "memory_bytes": list(row.prediction.memory),
            "sent_bytes": row.prediction.sent,
            "bubble": row.prediction.bubble,
            "stores": [asdict(one) for one in row.prediction.stores],
        }
        for row in rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main()
