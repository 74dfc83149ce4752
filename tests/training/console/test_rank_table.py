from __future__ import annotations

from spatialdl.parallel.placement import Placement
from spatialdl.text import width
from spatialdl.training.console.rank_table import rank_lines
from spatialdl.training.console.start_table import Device

SP_PP = """
rank  host   device  replica  stage   rows  columns
   0  node1  cuda:0        0  0       0:49     0:70
   2  node1  cuda:1        0  0      49:99     0:70
   4  node1  cuda:2        0  1       0:99     0:70
   1  node2  cuda:0        1  0       0:49     0:70
   3  node2  cuda:1        1  0      49:99     0:70
   5  node2  cuda:2        1  1       0:99     0:70
"""
GEMS = """
rank  replica  stage             rows  columns
   0        0  0                 0:49     0:70
   0        0  1 of the copy     0:99     0:70
   1        0  0, 0 of the copy  49:99    0:70
   2        0  1                 0:99     0:70
   2        0  0 of the copy     0:49     0:70
"""
LOCAL_DP = """
rank  replica  stage   rows  columns  samples
   0        0  0      0:100     0:70      all
   1        0  1      0:100     0:70   1 of 2
   2        0  1      0:100     0:70   2 of 2
"""

TENSOR = """
rank  replica  stage   rows  columns  channels
   0        0  0       0:50     0:70  1 of 2
   1        0  0       0:50     0:70  2 of 2
   2        0  0     50:100     0:70  1 of 2
   3        0  0     50:100     0:70  2 of 2
   4        0  1      0:100     0:70  all
"""


def test_ranks_are_told_in_the_order_of_the_layout():
    placement = Placement(2, ((2, 1), (1, 1)), order=(0, 2, 4, 1, 3, 5))
    devices = [Device(f"node{1 + rank % 2}", f"cuda:{rank // 2}", "a GPU") for rank in range(6)]
    lines = rank_lines(placement, (99, 70), devices)
    assert [line.split() for line in lines] == [line.split() for line in SP_PP.split("\n")[1:-1]]
    assert len({width(line) for line in lines}) == 1


def test_what_lies_on_several_stages_has_a_line_a_box():
    mirrored = rank_lines(Placement(1, ((2, 1), (1, 1)), mirrored=True), (99, 70))
    assert [line.split() for line in mirrored] == [line.split() for line in GEMS.split("\n")[1:-1]]
    dealt = rank_lines(Placement(1, ((2, 1), (1, 2)) * 2, interleave=4), (9, 8))
    assert [line.split()[2:] for line in dealt[1:]] == [
        ["0,", "2", "0:4", "0:8"],
        ["1,", "3", "0:9", "0:4"],
        ["0,", "2", "4:9", "0:8"],
        ["1,", "3", "0:9", "4:8"],
    ]


def test_ranks_may_divide_samples():
    lines = rank_lines(Placement(1, ((1, 1), (1, 1)), batch=(1, 2)), (100, 70))
    assert [line.split() for line in lines] == [line.split() for line in LOCAL_DP.split("\n")[1:-1]]


def test_ranks_may_divide_channels():
    lines = rank_lines(Placement(1, ((2, 1), (1, 1)), tensor=(2, 1)), (100, 70))
    assert [line.split() for line in lines] == [line.split() for line in TENSOR.split("\n")[1:-1]]


def test_many_ranks_are_readable():
    devices = [Device(f"node{rank // 8:03d}", f"cuda:{rank % 8}", "") for rank in range(512)]
    lines = rank_lines(Placement(64, ((2, 4),)), (8192, 8192), devices)
    heads = [number for number, line in enumerate(lines) if line.startswith("rank")]
    assert heads[:3] == [0, 41, 82]
    assert len(lines) == 512 + len(heads)
    assert len({width(line) for line in lines}) == 1
    assert lines[-1].split() == [
        *("511", "node063", "cuda:7", "63", "0", "4096:8192", "6144:8192"),
    ]
