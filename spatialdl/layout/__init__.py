"""Boxes, layouts and placements of ranks, in integer arithmetic.

Nothing here knows tensors, messages or PyTorch. From the sizes of an image and the degrees of a
layout every rank computes where the data of all ranks lie, so that nobody has to ask.

A box is a half-open interval per dim. A layout lists the box of every rank. An operation asks it
which box of its input a box of its output needs. An image of ten rows on two ranks, and what a
convolution of three rows needs on rank 0::

     row 0  +----------------+ . . . . . .    rank 0 owns rows 0 to 4
            |     rank 0     |           :    and needs rows 0 to 5
         5  +----------------+ . . . . . :    the halo is row 5 of rank 1
            |     rank 1     |
        10  +----------------+

In the order in which to read: `layout.py` (bounds, boxes, layouts, windows of operations),
`placement.py` (the degrees of all axes, and which rank holds which part of which stage),
`partition.py` (channels over the tensor axis), `node_order.py` (which rank takes which place, so
that ranks that talk most share a node).
"""
