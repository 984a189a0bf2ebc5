"""A runtime of MLServer around ONNX Runtime."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from sessions import session


class Onnx(MLModel):
    async def load(self):
        self.session = session(self.settings.parameters.uri)
        self.output = self.session.get_outputs()[0].name
        return True

    async def predict(self, payload):
        feeds = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        (value,) = self.session.run(None, feeds)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output(self.output, value)])
