"""Telemetry of the server: readings, the Prometheus page, and a web page."""
