"""Bundles of runs and of ONNX files, and the files of each tier."""
