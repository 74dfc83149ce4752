"""Random augmentation of training images, drawn per sample and epoch, applied box by box."""
