"""Which rank holds which part of what: boxes, layouts, placements. Integers only."""
