"""Network of a run: construction, pretrained weights, freezing."""
