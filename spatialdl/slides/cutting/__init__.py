"""Selection of tiles and regions of a slide, filters, and stain normalisation."""
