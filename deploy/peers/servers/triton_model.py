"""Triton's Python backend around ONNX Runtime; requests that Triton has gathered run as one where shapes allow it."""

import json

import numpy as np
import triton_python_backend_utils as utils
from sessions import session


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.names = [tensor["name"] for tensor in config["input"]]
        self.output = config["output"][0]["name"]
        self.session = session(config["parameters"]["file"]["string_value"])

    def execute(self, requests):
        rows = [[utils.get_input_tensor_by_name(r, name).as_numpy() for name in self.names] for r in requests]
        if len(rows) > 1 and len({tuple(a.shape[1:] for a in arrays) for arrays in rows}) == 1:
            together = [np.concatenate(arrays) for arrays in zip(*rows, strict=True)]
            (values,) = self.session.run(None, dict(zip(self.names, together, strict=True)))
            ends = np.cumsum([len(arrays[0]) for arrays in rows])[:-1]
            answers = np.split(values, ends)
        else:
            answers = [self.session.run(None, dict(zip(self.names, arrays, strict=True)))[0] for arrays in rows]
        return [utils.InferenceResponse([utils.Tensor(self.output, answer)]) for answer in answers]
