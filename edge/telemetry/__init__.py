"""Telemetry of the server: readings, metrics for Prometheus, and a live page."""
