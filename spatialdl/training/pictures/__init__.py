"""Pictures of a run: curves, examples, heat maps, timelines."""
