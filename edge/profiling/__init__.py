"""Latency of layer shapes on one device: the table, the models to time, and the timing."""
