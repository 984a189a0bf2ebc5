"""What is counted and read: latency, memory, sensors, logs, traces. They know nothing of the server."""
