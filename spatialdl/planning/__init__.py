"""Predicts the costs of a layout: operations counted without data, and a model of a cluster."""
