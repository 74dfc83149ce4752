"""The training loop, what it is made of, and what it leaves behind.

::

    configuration -> checks.py -> settings.py (data) -> network/ -> parts.py -> trainer.py
      each step:    rank_loader.py -> trainer.py (pipeline: forward, backward) -> optimization/
      now and then: validation.py, checkpoints/, reporter.py (console/, loggers.py, pictures/)
      at the end:   report.py

In the order in which to read: `trainer.py` (the loop), `parts.py` (what it consists of),
`layouts.py` (ranks and schedule of a configuration), `tasks/` (losses, metrics, predictions),
`progress.py` and `step_sync.py` (what all ranks agree on in a step), `finite.py` (NaN),
`signals.py` (stopping), `checkpoints/checkpoints.py` (saving and resuming), `virtual_tiles.py`
(images larger than memory), `bags.py` and `bag_sources.py` (slides as bags of tiles),
`lightning.py` (Lightning's trainer).
"""
