"""Features of the tiles of slides and data sets, computed with a frozen encoder."""
