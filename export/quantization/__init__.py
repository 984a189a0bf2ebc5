"""INT8: with scales computed at run time for ONNX Runtime, and with fixed ones for TensorRT.

``dynamic`` makes the file for CPUs. ``ranges`` measures the inputs of the matrix products, ``static`` writes the file
for TensorRT with their scales, and ``training`` trains a model for them. ``fewheads int8`` compares the ways.
"""
