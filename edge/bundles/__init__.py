"""Bundles, their manifest and golden outputs, and the processing steps around a model."""
