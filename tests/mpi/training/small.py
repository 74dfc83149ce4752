"""A network that is quick to train, with a part that frozen layers come before."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def small(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 4, 5, stride=2, padding=2, bias=False),
            bn1=nn.BatchNorm2d(4),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 6, 3, stride=2, padding=1),
            bn2=nn.BatchNorm2d(6),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(6, 6, 3, padding=1),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(6, num_classes),
        )
    )
