"""Fewheads on the device: read a bundle, build it, serve it, measure it. Never imports torch."""

__version__ = "0.5.0"
