"""Communication between ranks: repartition, reductions, hand-over; launch and watchdog of ranks."""
