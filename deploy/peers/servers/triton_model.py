"""ONNX Runtime in Triton's Python backend; requests of one dynamic batch share a run where their shapes allow it."""

import json

import numpy as np
import triton_python_backend_utils as utils
from sessions import session


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.names = [tensor["name"] for tensor in config["input"]]
        self.output = config["output"][0]["name"]
        self.session = session(parameters["file"], float(parameters["run_ms"]))

    def execute(self, requests):
        rows = [[utils.get_input_tensor_by_name(r, name).as_numpy() for name in self.names] for r in requests]
        if len(rows) > 1 and len({tuple(a.shape[1:] for a in arrays) for arrays in rows}) == 1:
            together = [np.concatenate(arrays) for arrays in zip(*rows, strict=True)]
            (values,) = self.session.run(None, dict(zip(self.names, together, strict=True)))
            answers, end = [], 0
            for arrays in rows:
                begin, end = end, end + len(arrays[0])
                answers.append(values[begin:end])
        else:
            answers = [self.session.run(None, dict(zip(self.names, arrays, strict=True)))[0] for arrays in rows]
        return [utils.InferenceResponse([utils.Tensor(self.output, answer)]) for answer in answers]
