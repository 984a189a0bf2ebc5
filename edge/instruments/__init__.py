"""Metrics of models, memory, sensors and logs, without any knowledge of the server."""
