"""The two graphs of a served looped model: one embeds prompts, one runs a single loop of several at once.

A device keeps the state between loops, so that no graph contains ONNX's ``Loop``, which TensorRT and ONNX Runtime can
only run as a whole. Prompts of different lengths share a run: shorter ones have zeros at the end, which earlier tokens
never see, and ``last`` says where each ends.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.looped.model import PromptTransformer
from export.looped.solvers import RESIDUAL_TOKENS

STEP_INPUTS = ("state", "prompt", "last")
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
    :mod:`export.looped.solvers`.
    """

    def __init__(self, model: PromptTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor, prompt: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return next state, prediction and residual."""
        next_state = self.model.step(state, prompt)
        behind = last - torch.arange(state.shape[1], device=state.device)  # [N, T]: 0 at the last token, then 1, …
        # Products with masks: TensorRT computes them in any precision, and a gather would be a kernel of its own.
        at_last = (behind == 0).to(state.dtype)[:, None, :]  # [N, 1, T]
        compared = ((behind >= 0) & (behind < RESIDUAL_TOKENS)).to(state.dtype)  # [N, T]
        prediction = self.model.read_out((at_last @ next_state)[:, 0])
        change = ((next_state - state).square().sum(dim=2) * compared).sum(dim=1, keepdim=True)
        size = (next_state.square().sum(dim=2) * compared).sum(dim=1, keepdim=True)
        return next_state, prediction, (change / size).sqrt()
