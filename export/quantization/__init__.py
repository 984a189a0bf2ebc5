"""INT8: with scales computed at run time for ONNX Runtime, and with fixed ones for TensorRT.

``dynamic`` makes the file for CPUs. ``ranges`` measures the inputs of the matrix products, ``static`` writes the file for
TensorRT with their scales, ``training`` trains a model for them, and ``accuracy`` scores files. ``compare`` is
``fewheads int8``.
"""
