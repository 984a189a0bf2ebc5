"""Bundles from a user's own ONNX files, alone, in a Hugging Face directory or in Triton's: ``fewheads pack``."""
