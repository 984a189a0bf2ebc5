"""Latency of the shapes of a layer on one device: the table, the models that are timed, and the timing."""
