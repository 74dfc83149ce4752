"""Trained networks at work: prediction, evaluation, features, analysis of features."""
