"""LitServe around ONNX Runtime: python litserve_server.py PORT NAME=FILE...; JSON over HTTP at /NAME."""

import sys

import litserve
import numpy as np
from sessions import session


class Onnx(litserve.LitAPI):
    def __init__(self, path, **options):
        self.path = path
        super().__init__(**options)

    def setup(self, device):
        self.session = session(self.path)
        types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.types = {tensor.name: types[tensor.type] for tensor in self.session.get_inputs()}

    def decode_request(self, request):
        return {name: np.array(value, self.types[name]) for name, value in request.items()}

    def predict(self, feeds):
        return self.session.run(None, feeds)[0]

    def encode_response(self, value):
        return {"output": value.tolist()}


if __name__ == "__main__":
    models = [argument.split("=") for argument in sys.argv[2:]]
    server = litserve.LitServer([Onnx(path, api_path=f"/{name}") for name, path in models], accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
