"""Variables on parameter servers: their rows, updates, snapshots and replicas. NumPy alone."""
