"""Predicts what a layout costs, and finds the best one, without data and without ranks.

A network runs once on the ``meta`` device, as the rank of a grid with the largest tile would run
it. What it computes, sends and keeps is recorded; all layouts are predicted from such records::

    network, sizes -> dry run per grid -> costs of parts -> stages -> memory, seconds -> search

In the order in which to read: `job.py` (what is planned), `program.py` (the steps of the network),
`costs.py` and `peaks.py` (operations, messages and memory of its parts), `stage.py` (of a stage),
`cluster.py` (rates of devices and links; `calibrate.py` measures them), `predict.py` (memory and
time of a layout), `search.py` (the best layouts), `setup.py` (from a configuration).
`preflight.py` finds operations that a layout would refuse; `fakecomm.py` runs it as a command.

This room lies above training, whose networks, optimizers and checks it uses.
"""
