"""Loggers besides the run directory: TensorBoard, Weights & Biases, MLflow."""
