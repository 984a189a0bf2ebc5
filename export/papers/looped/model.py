"""Looped and unlooped transformers for prompts of points and values.

A prompt x_1, y_1, …, x_k, y_k, x_(k+1) becomes 2k + 1 tokens: a point has its d coordinates, a value is the first
coordinate of a token with zeros behind it. The output at the token of x_i predicts y_i. A looped model applies its few
layers M again and again, and injects the prompt P before each loop:

    Y_0 = 0,   Y_(t+1) = M(Y_t + P)

That is the paper's injection, ``add``. Two others are ``multiply``, M(Y_t * P) with Y_0 = 1, and ``gated``,
M(g * Y_t + (1 - g) * P) with Y_0 = 0 and g = sigmoid(W [Y_t, P] + b). Without an injection, the weights are tied and
the prompt is only the start: Y_0 = P. The residual of a loop is the change of the last two tokens, the last pair's
value and the point to predict: ‖Y_(t+1) - Y_t‖ / ‖Y_(t+1)‖.

A served model has two graphs: one embeds prompts, one runs a single loop of several at once. A device keeps the state
between loops, so that no graph contains ONNX's ``Loop``, which TensorRT and ONNX Runtime can only run as a whole.
Prompts of different lengths share a run: shorter ones have zeros at the end, which earlier tokens never see. An
unlooped model has one graph, from prompts to predictions.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from export.models.convert import to_onnx
from export.models.transformer import Layer, LayerShape, TransformerConfig

Injection = Literal["add", "multiply", "gated", "none"]
#: Tokens whose change is the residual.
RESIDUAL_TOKENS = 2
#: Names of the tensors of the served graphs, and the dynamic dimensions of the inputs.
EMBED_INPUTS: dict[str, dict[int, str]] = {"xs": {0: "batch", 1: "points"}, "ys": {0: "batch", 1: "pairs"}}
EMBED_OUTPUTS = ("prompt", "state")
STEP_INPUTS: dict[str, dict[int, str]] = {
    "state": {0: "batch", 1: "tokens"},
    "prompt": {0: "batch", 1: "tokens"},
    "last": {0: "batch"},
}
STEP_OUTPUTS = ("next_state", "prediction", "residual")
UNLOOPED_OUTPUTS = ("prediction",)
#: GPT-2's deviation of new weights.
_DEVIATION = 0.02


class PromptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a model.

    Attributes:
        dims, dim: d, coordinates of a point, and D, the width of a token.
        points: the most points of a prompt, the one to predict included.
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
            architecture="gpt2",
            dim=self.dim,
            layers=self.shapes,
            max_positions=2 * self.points,
            norm_eps=1e-5,
            tanh_gelu=True,
        )


def gpt2_shapes(dim: int, heads: int, layers: int) -> tuple[LayerShape, ...]:
    """Return the shapes of GPT-2's layers: heads that share the width, a feed-forward four times as wide."""
    return (LayerShape(heads, dim // heads, 4 * dim),) * layers


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
        # GPT-2: N(0, 0.02), and smaller for the projections onto the residual stream.
        for name, parameter in self.layers.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                onto = name.endswith(("output_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(2 * len(self.layers) if onto else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.position.weight, std=_DEVIATION)

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

    def step(self, state: Tensor, prompt: Tensor) -> Tensor:
        """Return Y_(t+1), [N, T, D], for Y_t and P."""
        x = self._injected(state, prompt) + self.position.weight[: prompt.shape[1]]
        for layer in self.layers:
            x = layer(x)
        normalised: Tensor = self.final_norm(x)
        return normalised

    def _injected(self, state: Tensor, prompt: Tensor) -> Tensor:
        if self.config.injection == "add":
            return state + prompt
        if self.config.injection == "multiply":
            return state * prompt
        if self.gate is not None:
            return torch.lerp(prompt, state, self.gate(torch.cat([state, prompt], dim=-1)).sigmoid())
        return state

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


class Trajectory(NamedTuple):
    """Predictions [t, N] at the last point after each loop, and the residuals [t, N]."""

    predictions: Array
    residuals: Array

    def stopped(self, tolerance: float) -> tuple[Array, Array]:
        """Return predictions and loops [N] at the first residual of at most ``tolerance``, or else at the end."""
        settled = self.residuals <= tolerance
        settled[-1] = True
        first = settled.argmax(axis=0)
        return self.predictions[first, range(len(first))], first + 1


def residual_of(state: Tensor, next_state: Tensor) -> Tensor:
    """Return the residuals [N] of a loop between two states [N, T, D]."""
    change, size = (x[:, -RESIDUAL_TOKENS:].flatten(1).norm(dim=1) for x in (next_state - state, next_state))
    residual: Tensor = change / size
    return residual


@torch.no_grad()
def trajectory(model: PromptTransformer, xs: Tensor, ys: Tensor, loops: int) -> Trajectory:
    """Run a number of loops, of an unlooped model one; arguments as of ``PromptTransformer.forward``."""
    prompt = model.embed(xs, ys)
    state = model.first_state(prompt)
    predictions, residuals = [], []
    for _ in range(loops):
        previous, state = state, model.step(state, prompt)
        predictions.append(model.predict(state)[:, -1])
        residuals.append(residual_of(previous, state))
    return Trajectory(torch.stack(predictions).cpu().numpy(), torch.stack(residuals).cpu().numpy())


class _Graph(nn.Module):
    def __init__(self, model: PromptTransformer) -> None:
        super().__init__()
        self.model = model


class Embed(_Graph):
    """Prompts to tokens: xs [N, k + 1, d] and ys [N, k] to P and Y_0, both [N, 2k + 1, D]."""

    def forward(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompt and the first state."""
        prompt = self.model.embed(xs, ys)
        return prompt, self.model.first_state(prompt)


class StepGraph(_Graph):
    """One loop of prompts whose last tokens have the indices ``last``, [N, 1] int64."""

    def forward(self, state: Tensor, prompt: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return next state [N, T, D], prediction [N, 1] at the last token, and residual [N, 1]."""
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


class UnloopedGraph(_Graph):
    """A whole model without loops: xs [N, n, d] and ys [N, k] to a prediction [N, 1]."""

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        """Return the prediction at the first point without a value, or at the last one if all have a value."""
        prompt = self.model.embed(xs, ys)
        points, values = (torch.full((xs.shape[0], 1), of.shape[1], device=xs.device) for of in (xs, ys))
        last = 2 * torch.minimum(points - 1, values)
        prediction: Tensor = StepGraph(self.model)(self.model.first_state(prompt), prompt, last)[1]
        return prediction


def embed_onnx(model: PromptTransformer) -> bytes:
    """Return the ONNX model of :class:`Embed`."""
    return to_onnx(Embed(model), _prompts(model.config), EMBED_OUTPUTS, EMBED_INPUTS)


def unlooped_onnx(model: PromptTransformer) -> bytes:
    """Return the ONNX model of :class:`UnloopedGraph`."""
    return to_onnx(UnloopedGraph(model), _prompts(model.config), UNLOOPED_OUTPUTS, EMBED_INPUTS)


def step_onnx(model: PromptTransformer) -> bytes:
    """Return the ONNX model of :class:`StepGraph`."""
    feeds = {name: torch.from_numpy(array) for name, array in step_feeds(model.config, 2).items()}
    return to_onnx(StepGraph(model), feeds, STEP_OUTPUTS, STEP_INPUTS)


def step_feeds(config: PromptConfig, rows: int) -> dict[str, Array]:
    """Return inputs of :class:`StepGraph`: random states of prompts of the longest length."""
    tokens = 2 * config.points - 1
    state, prompt = np.random.default_rng(0).standard_normal((2, rows, tokens, config.dim)).astype(np.float32)
    return dict(zip(STEP_INPUTS, (state, prompt, np.full((rows, 1), tokens - 1, np.int64)), strict=True))


def _prompts(config: PromptConfig) -> dict[str, Tensor]:
    xs, ys = torch.zeros(2, config.points, config.dims), torch.zeros(2, config.points - 1)
    return dict(zip(EMBED_INPUTS, (xs, ys), strict=True))
