"""Encoders of timm, transformers and torchvision, and the user's own."""
