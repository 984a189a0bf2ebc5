"""Bundles from a user's own ONNX file: ``fewheads export model.onnx``.

- :mod:`export.own_onnx.options`: the options of the command, and its table
- :mod:`export.own_onnx.model`: the file, read and checked
- :mod:`export.own_onnx.profiles`: the shapes of its inputs
- :mod:`export.own_onnx.golden`: golden inputs and outputs, and the checks of the graph
- :mod:`export.own_onnx.bundle`: the bundle of all these
"""
