"""Images larger than a device: virtual ranks one after the other, their tensors in a store."""
