"""A backend for Triton with the name and files of its ``onnxruntime``, which the wheel lacks: it is Python's.

All but the runs is Triton's own: the configuration and its checks, shapes, reshapes, labels and dynamic batches.
"""

import json
from pathlib import Path

import onnxruntime
import triton_python_backend_utils as utils


class TritonPythonModel:
    def initialize(self, args):
        file = json.loads(args["model_config"])["default_model_filename"] or "model.onnx"
        path = Path(args["model_repository"], args["model_version"], file)
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        names = request.requested_output_names()
        values = self.session.run(names, {tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        return utils.InferenceResponse(list(map(utils.Tensor, names, values)))
