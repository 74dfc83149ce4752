"""What a layout will cost: operations counted without data, and a cluster that carries them out."""
