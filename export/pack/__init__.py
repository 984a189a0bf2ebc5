"""Bundles from a user's own ONNX file: ``fewheads pack MODEL.onnx``.

- :mod:`export.commands.pack`: the command
- :mod:`export.bundle.pack.bundle`: its options
- :mod:`export.bundle.pack.graph`: the file and its external data, read
- :mod:`export.bundle.pack.graph`: the operators of its graph, and which runtimes take them
- :mod:`export.bundle.pack.model`: the model, checked against what a bundle may hold
- :mod:`export.bundle.pack.profiles`: the shapes of its inputs
- :mod:`export.bundle.pack.inputs`: golden and calibration inputs, random or from a file
- :mod:`export.bundle.pack.steps`: the step that reads images, and images for both
- :mod:`export.bundle.pack.steps`: the labels of a classifier
- :mod:`export.bundle.pack.golden`: golden outputs, and the checks of the graph
- :mod:`export.bundle.pack.quantize`: graphs with folded constants and batch normalisations
- :mod:`export.bundle.pack.quantize`: INT8 for graphs with convolutions and matrix products
- :mod:`export.bundle.pack.golden`: errors of a reduced precision, and their limits
- :mod:`export.bundle.pack.variants`: values beyond the range of FP16
- :mod:`export.bundle.pack.variants`: the files in FP16 and INT8
- :mod:`export.bundle.pack.bundle`: the bundle of all these
- :mod:`export.bundle.pack.bundle`: what the command reports
"""
