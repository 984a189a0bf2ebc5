"""Instruments: the metrics of models, memory, sensors and logs. They know nothing of the server."""
