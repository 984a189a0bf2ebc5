"""Bundles from a user's own ONNX file: ``fewheads pack MODEL.onnx``.

- :mod:`export.pack.cli`: the command
- :mod:`export.pack.options`: its options
- :mod:`export.pack.weights`: the file and its external data, read
- :mod:`export.pack.operators`: the operators of its graph, and which runtimes take them
- :mod:`export.pack.model`: the model, checked against what a bundle may hold
- :mod:`export.pack.profiles`: the shapes of its inputs
- :mod:`export.pack.inputs`: golden and calibration inputs, random or from a file
- :mod:`export.pack.images`: the step that reads images, and images for both
- :mod:`export.pack.labels`: the labels of a classifier
- :mod:`export.pack.golden`: golden outputs, and the checks of the graph
- :mod:`export.pack.simplify`: graphs with folded constants and batch normalisations
- :mod:`export.pack.quantize`: INT8 for graphs with convolutions and matrix products
- :mod:`export.pack.accuracy`: errors of a reduced precision, and their limits
- :mod:`export.pack.overflow`: values beyond the range of FP16
- :mod:`export.pack.variants`: the files in FP16 and INT8
- :mod:`export.pack.bundle`: the bundle of all these
- :mod:`export.pack.packed`: what the command reports
"""
