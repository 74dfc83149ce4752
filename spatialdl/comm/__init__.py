"""Tensors between ranks: moved between layouts, added up, handed on; and how ranks come to be."""
