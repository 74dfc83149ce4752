"""From whole slides to data sets of tiles or regions.

::

    slide -> reading/ any box at any resolution -> finding/ where tissue is, what is annotated
          -> cutting/ which tiles, which filters -> batch/ many slides, workers, resume -> data set

In the order in which to read: `reading/reader.py` (a slide), `cutting/tiling.py` (its tiles),
`batch/steps.py` (plan, cut and finish a slide), `batch/run.py` (all slides), `batch/record.py`
(what is done, and still valid), `tile_cli.py` (the command). `cohort/` splits slides of many
patients; `inspection.py` describes slides and data sets; `synthetic.py` draws slides for tests.
"""
