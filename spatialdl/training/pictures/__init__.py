"""Pictures of a run: loss curves, sample galleries, heat maps, timelines."""
