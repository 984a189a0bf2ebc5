"""Transformers with their heads, and their conversion from Hugging Face directories and to ONNX."""
