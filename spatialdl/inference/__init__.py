"""Trained networks at work on slides, volumes and data sets, and what can be said of their results.

::

    slides, volumes,       predicting/  maps, tables, polygons     evaluating/  against labels
    data sets         -->  features/    vectors of tiles      -->  analysis/    clusters, ...

One loop goes over the inputs of both, `predicting/loop.py`: it opens an input, runs the network on
this rank's part of it, stitches and writes, records what became of it, and goes on after errors.
"""
