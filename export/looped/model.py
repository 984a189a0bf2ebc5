"""Looped and unlooped transformers for prompts of points and values.

A prompt x_1, y_1, …, x_k, y_k, x_(k+1) becomes 2k + 1 tokens: a point has its d coordinates, a value is the first
coordinate of a token with zeros behind it. The output at the token of x_i predicts y_i. A looped model applies its few
layers M again and again, and injects the prompt P before each loop:

    Y_0 = 0,   Y_(t+1) = M(Y_t + P)

With another injection, the sum is a product (then Y_0 = 1), or a gate decides how much of the prompt each coordinate
takes. Without one, the weights are tied and the prompt is only the start: Y_0 = P.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from export.models.transformer import Layer, LayerShape, TransformerConfig

Injection = Literal["add", "multiply", "gated", "none"]
#: GPT-2's deviation of new weights.
_DEVIATION = 0.02


class PromptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a model.

    Attributes:
        dims: d, coordinates of a point.
        points: the most points of a prompt, the one to predict included.
        dim: D, the width of a token.
        shapes: of the layers; they are looped together.
        injection: of the prompt into each loop; None is an unlooped model, which runs its layers once.
    """

    dims: int
    points: int
    dim: int
    shapes: tuple[LayerShape, ...]
    injection: Injection | None = "add"

    @property
    def transformer(self) -> TransformerConfig:
        """The layers: GPT-2's, pre-LN and causal."""
        return TransformerConfig(
            architecture="gpt2", dim=self.dim, layers=self.shapes, max_positions=2 * self.points, norm_eps=1e-5,
            tanh_gelu=True,
        )  # fmt: skip


def gpt2_shapes(dim: int, heads: int, layers: int) -> tuple[LayerShape, ...]:
    """Return the shapes of GPT-2's layers: heads that share the width, a feed-forward four times as wide."""
    return (LayerShape(heads, dim // heads, 4 * dim),) * layers


class Loop(NamedTuple):
    """Result of one loop.

    Attributes:
        state: Y_(t+1), [N, T, D].
        prediction: of the value at each point, [N, n].
    """

    state: Tensor
    prediction: Tensor


class PromptTransformer(nn.Module):
    """A transformer over prompts; see the module."""

    def __init__(self, config: PromptConfig) -> None:
        super().__init__()
        self.config = config
        self.read_in = nn.Linear(config.dims, config.dim)
        self.position = nn.Embedding(2 * config.points, config.dim)
        self.layers = nn.ModuleList(Layer(config.transformer, shape) for shape in config.shapes)
        self.final_norm = nn.LayerNorm(config.dim, eps=config.transformer.norm_eps)
        self.read_out = nn.Linear(config.dim, 1)
        self.gate = nn.Linear(2 * config.dim, config.dim) if config.injection == "gated" else None
        self._initialise()

    def embed(self, xs: Tensor, ys: Tensor) -> Tensor:
        """Return the prompt's tokens P, [N, 2n, D] or [N, 2n - 1, D].

        Args:
            xs: [N, n, d].
            ys: [N, n], or [N, n - 1] without the value of the last point.
        """
        values = nn.functional.pad(ys[..., None], (0, self.config.dims - 1, 0, xs.shape[1] - ys.shape[1]))
        tokens = torch.stack([xs, values], dim=2).flatten(1, 2)[:, : xs.shape[1] + ys.shape[1]]
        prompt: Tensor = self.read_in(tokens)
        return prompt

    def first_state(self, prompt: Tensor) -> Tensor:
        """Return Y_0, [N, T, D]."""
        if self.config.injection in ("add", "gated"):
            return torch.zeros_like(prompt)
        return torch.ones_like(prompt) if self.config.injection == "multiply" else prompt

    def layers_input(self, state: Tensor, prompt: Tensor) -> Tensor:
        """Return what the first layer reads, [N, T, D]: the state with the prompt and the positions."""
        return self._injected(state, prompt) + self.position.weight[: prompt.shape[1]]

    def step(self, state: Tensor, prompt: Tensor) -> Tensor:
        """Return Y_(t+1), [N, T, D], for Y_t and P."""
        x = self.layers_input(state, prompt)
        for layer in self.layers:
            x = layer(x)
        normalised: Tensor = self.final_norm(x)
        return normalised

    def predict(self, state: Tensor) -> Tensor:
        """Return the predictions at all points, [N, n], of a state [N, 2n, D] or [N, 2n - 1, D]."""
        values: Tensor = self.read_out(state[:, ::2])
        return values[..., 0]

    def forward(self, xs: Tensor, ys: Tensor, loops: int = 1, graded: int | None = None) -> list[Tensor]:
        """Return the predictions [N, n] after the last loops.

        Args:
            xs: [N, n, d].
            ys: [N, n] or [N, n - 1].
            loops: number of loops; 1 for an unlooped model.
            graded: number of last loops that are returned and have gradients; None is all.
        """
        prompt = self.embed(xs, ys)
        state = self.first_state(prompt)
        ungraded = 0 if graded is None else max(0, loops - graded)
        with torch.no_grad():
            for _ in range(ungraded):
                state = self.step(state, prompt.detach())
        predictions = []
        for _ in range(loops - ungraded):
            state = self.step(state, prompt)
            predictions.append(self.predict(state))
        return predictions

    @property
    def parameter_count(self) -> int:
        """Number of parameters without the positions, as papers count them."""
        return sum(parameter.numel() for parameter in self.parameters()) - self.position.weight.numel()

    def _injected(self, state: Tensor, prompt: Tensor) -> Tensor:
        if self.config.injection == "add":
            return state + prompt
        if self.config.injection == "multiply":
            return state * prompt
        if self.gate is not None:
            share = torch.sigmoid(self.gate(torch.cat([state, prompt], dim=-1)))
            return (1 - share) * state + share * prompt
        return state

    def _initialise(self) -> None:
        # GPT-2: N(0, 0.02), and smaller for the projections onto the residual stream.
        for name, parameter in self.layers.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                onto = name.endswith(("output_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(2 * len(self.layers) if onto else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.position.weight, std=_DEVIATION)
