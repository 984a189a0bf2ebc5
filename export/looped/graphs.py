"""The two graphs of a served looped model: one embeds prompts, one runs a single loop of several at once.

A device keeps the state between loops, so that no graph contains ONNX's ``Loop``, which TensorRT and ONNX Runtime can
only run as a whole. Prompts of different lengths share a run: shorter ones have zeros at the end, which earlier tokens
never see, and ``last`` says where each ends.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from export.models.convert import to_onnx
from export.papers.looped.model import PromptConfig, PromptTransformer
from export.papers.looped.solvers import RESIDUAL_TOKENS

#: Names of the tensors, and the dynamic dimensions of the inputs.
EMBED_INPUTS: dict[str, dict[int, str]] = {"xs": {0: "batch", 1: "points"}, "ys": {0: "batch", 1: "pairs"}}
EMBED_OUTPUTS = ("prompt", "state")
STEP_INPUTS: dict[str, dict[int, str]] = {
    "state": {0: "batch", 1: "tokens"},
    "prompt": {0: "batch", 1: "tokens"},
    "last": {0: "batch"},
}
STEP_OUTPUTS = ("next_state", "prediction", "residual")


class Embed(nn.Module):
    """Prompts to tokens: xs [N, k + 1, d] and ys [N, k] to P and Y_0, both [N, 2k + 1, D]."""

    def __init__(self, model: PromptTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompt and the first state."""
        prompt = self.model.embed(xs, ys)
        return prompt, self.model.first_state(prompt)


class StepGraph(nn.Module):
    """One loop: state and prompt [N, T, D], and the index ``last`` [N, 1] of each prompt's last token, int64.

    Returns the next state [N, T, D], the prediction [N, 1] at the last token, and the residual [N, 1] of
    :mod:`export.papers.looped.solvers`.
    """

    def __init__(self, model: PromptTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor, prompt: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return next state, prediction and residual."""
        next_state = self.model.step(state, prompt)
        behind = last - torch.arange(state.shape[1], device=state.device)  # [N, T]: 0 at the last token, then 1, …
        at_last = (behind == 0).to(state.dtype)  # [N, T]
        compared = ((behind >= 0) & (behind < RESIDUAL_TOKENS)).to(state.dtype)

        # Sums, which TensorRT fuses into the last normalisation; a gather and a product would be kernels of their own.
        def total(products: Tensor, mask: Tensor) -> Tensor:
            return (products.sum(dim=2) * mask).sum(dim=1, keepdim=True)  # [N, 1]

        read_out = self.model.read_out
        prediction = total(next_state * read_out.weight[0], at_last) + read_out.bias
        change, size = total((next_state - state).square(), compared), total(next_state.square(), compared)
        return next_state, prediction, (change / size).sqrt()


def embed_onnx(model: PromptTransformer) -> bytes:
    """Return the ONNX model of :class:`Embed`."""
    xs, ys = torch.zeros(2, model.config.points, model.config.dims), torch.zeros(2, model.config.points - 1)
    return to_onnx(Embed(model), dict(zip(EMBED_INPUTS, (xs, ys), strict=True)), EMBED_OUTPUTS, EMBED_INPUTS)


def step_onnx(model: PromptTransformer) -> bytes:
    """Return the ONNX model of :class:`StepGraph`."""
    feeds = {name: torch.from_numpy(array) for name, array in step_feeds(model.config, 2).items()}
    return to_onnx(StepGraph(model), feeds, STEP_OUTPUTS, STEP_INPUTS)


def step_feeds(config: PromptConfig, rows: int) -> dict[str, Array]:
    """Return inputs of :class:`StepGraph`: random states of prompts of the longest length."""
    tokens = 2 * config.points - 1
    state, prompt = np.random.default_rng(0).standard_normal((2, rows, tokens, config.dim)).astype(np.float32)
    return dict(zip(STEP_INPUTS, (state, prompt, np.full((rows, 1), tokens - 1, np.int64)), strict=True))
