"""BentoML around ONNX Runtime: JSON over HTTP at /mlp and /minilm; the environment says where the models are."""

import os

import bentoml
import numpy as np
from sessions import session


@bentoml.service(traffic={"timeout": 60})
class Onnx:
    def __init__(self):
        self.sessions = {name: session(os.environ[f"MODEL_{name.upper()}"]) for name in ("mlp", "minilm")}

    @bentoml.api
    def mlp(self, x: list) -> dict:
        return {"output": self.sessions["mlp"].run(None, {"x": np.array(x, np.float32)})[0].tolist()}

    @bentoml.api
    def minilm(self, input_ids: list, attention_mask: list) -> dict:
        feeds = {"input_ids": np.array(input_ids), "attention_mask": np.array(attention_mask)}
        return {"output": self.sessions["minilm"].run(None, feeds)[0].tolist()}
