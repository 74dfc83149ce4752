"""Random changes of the training images, drawn once a sample and epoch, applied box by box."""
