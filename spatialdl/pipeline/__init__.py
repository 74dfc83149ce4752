"""Networks cut into stages, and the schedules that run them."""
