from __future__ import annotations

import pytest
from torch import nn

from spatialdl.spatial.gather import gather_before


@pytest.mark.parametrize("name", [1, "1", [1], ["1"]])
def test_modules_of_a_chain_are_named_by_numbers(name):
    chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    gather_before(chain, name)
    assert [len(layer._forward_pre_hooks) for layer in chain] == [0, 1]


def test_the_first_module_of_a_chain_is_no_lack_of_a_name():
    chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    gather_before(chain, None)
    assert [len(layer._forward_pre_hooks) for layer in chain] == [0, 0]
    gather_before(chain, 0)
    assert [len(layer._forward_pre_hooks) for layer in chain] == [1, 0]
