"""Fewer and smaller heads, fewer hidden units: transformers reduced from measured activations, to a measured latency.

The methods are linear algebra over calibration inputs; none of them trains.
"""
