"""CLAM: attention over the tiles of a slide, with clustering losses of selected tiles.

Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images",
Nature Biomedical Engineering 2021 (https://doi.org/10.1038/s41551-020-00682-w): one attention
branch for all classes, or one per class; the tiles with the most and the least attention get
pseudo-labels from the slide's label.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models.bags import Embedding, GatedAttention, check_sizes


class CLAM(nn.Module):
    """CLAM with a single branch or one per class.

    In training, ``forward`` returns (N, 3 * num_classes): the logits, then per class the instance
    loss if the slide is of this class, then if it is of another one. In evaluation it returns
    (N, num_classes), the logits. The task `BagClassification` combines the losses.

    Args:
        num_classes: classes of slides.
        in_channels: width of the features.
        width: width of the embedded tiles.
        hidden: hidden width of the attention.
        branches: "single" or "multi".
        instances: number of tiles with the most, and of those with the least attention, that get
            pseudo-labels; at most half of a bag.
        instance_weight: weight of the instance loss; the slide's has 1. The default is CLAM's 0.3
            to 0.7.
        exclusive: whether the most attended tiles of one class are negatives of the others, for
            classes that are subtypes.
        dropout: dropout after the embedding and in the attention.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 1024,
        width: int = 512,
        hidden: int = 256,
        branches: str = "single",
        instances: int = 8,
        instance_weight: float = 0.43,
        exclusive: bool = False,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "in_channels": in_channels, "instances": instances}
        check_sizes(**sizes, width=width, hidden=hidden)
        if branches not in ("single", "multi"):
            raise ValueError(f'branches must be "single" or "multi", got "{branches}"')
        self.num_classes, self.instances = num_classes, instances
        self.instance_weight, self.exclusive = instance_weight, exclusive
        maps = num_classes if branches == "multi" else 1
        self.embed = Embedding(in_channels, width, dropout)
        self.attend = GatedAttention(width, hidden, maps, dropout)
        # each row of the weight classifies one class, with "multi" from that class's bag
        self.head = nn.Linear(width, num_classes)
        self.instance_head = nn.Linear(width, 2 * num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.embed(x)
        scores = self.attend(tiles)
        bags = scores.softmax(1).transpose(1, 2) @ tiles
        logits: Tensor
        if bags.shape[1] == 1:
            logits = self.head(bags.flatten(1))
        else:
            logits = (bags * self.head.weight).sum(2) + self.head.bias
        if not self.training:
            return logits
        return torch.cat([logits, *self._instance_losses(tiles, scores)], 1)

    def _instance_losses(self, tiles: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (N, num_classes), for slides of the class and for slides of other classes."""
        count = min(self.instances, max(1, tiles.shape[1] // 2))
        with torch.no_grad():
            most = (scores >= _kth(scores, count)).to(tiles.dtype)
            least = (-scores >= _kth(-scores, count)).to(tiles.dtype)
        # two-class cross entropy depends on the difference of logits only
        margin = self.instance_head(tiles).unflatten(2, (self.num_classes, 2))
        margin = margin[..., 1] - margin[..., 0]
        positive, negative = F.softplus(-margin), F.softplus(margin)
        of_most, of_others = _mean(positive, most), _mean(negative, most)
        inside = (of_most + _mean(negative, least)) / 2
        outside = of_others if self.exclusive else torch.zeros_like(of_others)
        return self.instance_weight * inside, self.instance_weight * outside

    def attention(self, x: Tensor) -> Tensor:
        """(N, 1 or num_classes, tiles): weights of the tiles, with sum 1."""
        return self.attend(self.embed(x)).softmax(1).transpose(1, 2)  # type: ignore[no-any-return]


def _kth(scores: Tensor, count: int) -> Tensor:
    """(N, 1, maps): the `count`-th largest distinct value over tiles of (N, tiles, maps).

    The largest are masked one after the other, which also works on a split bag.
    """
    for _ in range(count - 1):
        scores = torch.where(scores >= scores.amax(1, keepdim=True), -torch.inf, scores)
    return scores.amax(1, keepdim=True)


def _mean(losses: Tensor, chosen: Tensor) -> Tensor:
    """(N, classes): mean over chosen tiles (N, tiles, classes or 1)."""
    return (losses * chosen).sum(1) / chosen.sum(1)


clam = CLAM
