"""What is learned: losses, metrics and predictions of each task."""
