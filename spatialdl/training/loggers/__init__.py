"""Where a run is logged to beside its directory: TensorBoard, Weights & Biases, MLflow."""
