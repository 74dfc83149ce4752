"""Combines counted costs: extrapolates over samples, inserts a divided stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spatialdl.pipeline.steps import Value
from spatialdl.planning.costs import LayerCosts, NetworkCosts
from spatialdl.planning.parts import DividedStage
from spatialdl.planning.peaks import lives_between


def with_stage(whole: NetworkCosts, own: NetworkCosts, which: DividedStage) -> NetworkCosts:
    """Replace the costs of one stage by those counted for it with divided channels."""
    layers = [*whole.layers[: which.first], *own.layers, *whole.layers[which.after :]]
    heap, mapped = (
        with_stage(a, b, which) if a is not None and b is not None else None
        for a, b in ((whole.heap, own.heap), (whole.mapped, own.mapped))
    )
    loss = own.loss or whole.loss
    return replace(whole, layers=layers, loss=loss, lives=own.lives, heap=heap, mapped=mapped)


def between(a: NetworkCosts, b: NetworkCosts, share: float) -> NetworkCosts | None:
    """Extrapolate costs linearly from `a` (share 0) through `b` (share 1), over samples.

    Returns:
        None if the two runs had different operations.
    """
    if a.refused or b.refused or a.loss is None or b.loss is None:
        return None
    layers = [_between(x, y, share) for x, y in zip(a.layers, b.layers, strict=True)]
    loss, made = _between(a.loss, b.loss, share), lives_between(a.lives, b.lives, share)
    if loss is None or made is None or any(layer is None for layer in layers):
        return None
    return NetworkCosts(
        [layer for layer in layers if layer is not None],
        round(a.input + share * (b.input - a.input)),
        loss,
        a.uses,
        made,
    )


def _between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts | None:
    values: dict[str, Any] = {}
    for key, x in vars(a).items():
        y = getattr(b, key)
        if isinstance(x, list):
            if [entry[0] for entry in x] != [entry[0] for entry in y]:
                return None
            values[key] = [
                type(p)(
                    *(
                        m if isinstance(m, str | Value) else round(m + share * (n - m))
                        for m, n in zip(p, q, strict=True)
                    )
                )
                for p, q in zip(x, y, strict=True)
            ]
        elif isinstance(x, int) and not isinstance(x, bool):
            values[key] = round(x + share * (y - x))
        else:
            values[key] = x
    return LayerCosts(**values)
