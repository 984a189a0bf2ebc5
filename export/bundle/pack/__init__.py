"""Bundles from a user's own ONNX file: ``fewheads pack MODEL.onnx``."""
