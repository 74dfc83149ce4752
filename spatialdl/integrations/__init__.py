"""Training loops of other libraries on split images: Lightning."""
