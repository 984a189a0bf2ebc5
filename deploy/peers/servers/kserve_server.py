"""The SDK of KServe around ONNX Runtime: python kserve_server.py NAME=FILE... --grpc_port=PORT --http_port=PORT."""

import sys

from kserve import InferOutput, InferResponse, Model, ModelServer
from sessions import session


class Onnx(Model):
    def __init__(self, name, path):
        super().__init__(name)
        self.session = session(path)
        self.output = self.session.get_outputs()[0].name
        self.ready = True

    def predict(self, payload, headers=None, response_headers=None):
        (value,) = self.session.run(None, {tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        output = InferOutput(self.output, list(value.shape), "FP32")
        output.set_data_from_numpy(value)
        return InferResponse(payload.id, self.name, [output])


if __name__ == "__main__":
    models = [argument.split("=") for argument in sys.argv[1:] if not argument.startswith("--")]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    ModelServer(enable_latency_logging=False).start([Onnx(*model) for model in models])
