"""Import of images, patches and volumes of other programs as data sets."""
