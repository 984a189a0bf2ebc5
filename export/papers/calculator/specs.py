"""Facts on each of the calculator's models, without torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edge.bundles.manifest import Tolerance
from export.training.recipe import Recipe


class Paper(msgspec.Struct, frozen=True):
    """Figures of paper 000, section "Findings", table of regression models.

    ``mae_long`` is not an error of the network: the paper's code subtracts the predictions for the in-range split from
    the absolute values of the long one. A network that is perfect in range gets 6.17 there, and five of the six columns
    have 6.07 to 6.29. Each ``score`` has a baseline of its own, so they do not compare. The sixth column is from
    ``other_code``: its ``mae_long`` is an error, and its ``score`` has another formula, see
    :func:`export.papers.calculator.benchmark.paper_score`.
    """

    mae_in_range: float
    mre_in_range: float
    mae_out_of_range: float
    mre_out_of_range: float
    mae_long: float
    score: float
    other_code: bool = False

    def errors(self) -> dict[tuple[str, str], float]:
        """Return the figures but the score, by metric and split."""
        keys = [(metric, split) for split in ("in_range", "out_of_range") for metric in ("mae", "mre")]
        return dict(zip((*keys, ("mae", "long")), msgspec.structs.astuple(self)[:5], strict=True))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A model.

    Attributes:
        network: its class in :mod:`export.papers.calculator.networks`.
        arguments: of that class, which give the network's shape.
        recipe: None for a network that is constructed.
        resampled: whether it learns from a bootstrap resample of the training items.
        validated: whether the validation items decide when to stop, and which epoch is kept; else the training does.
        description: text in its bundle.
        tolerance: between ONNX Runtime and torch: several times the largest difference over all splits.
        max_abs_operand: the largest operand that a bundle accepts.
        paper: the published figures, if any.
    """

    network: str
    arguments: dict[str, Any] = {}
    recipe: Recipe | None
    resampled: bool = False
    validated: bool = True
    description: str
    tolerance: Tolerance = Tolerance(atol=2e-4, rtol=1e-5)
    max_abs_operand: float = 1e6
    paper: Paper | None = None


def _recipe(peak_learning_rate: float, *, epochs: int = 200, patience: int | None = 10, **changes: Any) -> Recipe:
    # eps is Keras' default, as in the original.
    settings = {"peak_learning_rate": peak_learning_rate, "epochs": epochs, "patience": patience, **changes}
    return Recipe(eps=1e-7, decays="all", **settings)


def _transformer_recipe(peak_learning_rate: float) -> Recipe:
    schedule: Literal["cosine"] = "cosine"
    clipped: dict[str, Any] = {"clip_norm": 1.0, "clips": "each", "betas": (0.85, 0.999), "weight_decay": 4e-3}
    return _recipe(
        peak_learning_rate, patience=20, warmup_share=21 / 200, schedule=schedule, final_share=0.1, **clipped
    )


#: Of the feed-forward and recurrent networks: Adam with Keras' defaults.
_ADAM = _recipe(1e-3, min_delta=1e-4)
_ATTENTIVE = _recipe(1e-3, epochs=100, patience=None)
_PUBLIC_LSTM = _recipe(1e-3, epochs=100, patience=5, min_delta=1e-3)
_CLOSE = Tolerance(atol=1e-4, rtol=1e-5)
_OUTSIDE = "sums of 3 operands from -5 to 4; its error grows outside of them"

#: The models by the names of their runs and bundles. Networks, optimisers and rates of paper 000's models are those of
#: its public code. When they stop differs: gains below 1e-4 do not count, as in that code's version of November 2025;
#: in the paper's, those below 1e-3 do not. Of transformers all count here. ``calculator-lstm`` learns from all items,
#: and keeps the best of 100 epochs. The paper's LSTM learns as ``calculator-lstm-public``; that of November learns from
#: a resample for 100 epochs, of which the last is kept.
SPECS: dict[str, Spec] = {
    "calculator-oracle": Spec(
        network="Oracle",
        arguments={"max_operand": 1024},
        recipe=None,
        description="Sums of up to 8 operands, right by construction: a known answer to check a device with",
        tolerance=Tolerance(atol=0.0, rtol=0.0),
        max_abs_operand=1024.0,
    ),
    "calculator-gate": Spec(
        network="Gate",
        recipe=_recipe(1e-2),
        description="Sums of up to 8 operands by attention with signed weights, 51 parameters",
        tolerance=Tolerance(atol=1e-5, rtol=1e-6),
    ),
    "calculator-softmax-gate": Spec(
        network="Gate",
        arguments={"pooling": "softmax"},
        recipe=_recipe(1e-2),
        description="The gate network with softmax attention over its terms, times their number",
        tolerance=_CLOSE,
    ),
    "calculator-term-network": Spec(
        network="TermNetwork",
        recipe=_recipe(1e-2),
        description="Sums of up to 8 operands by one small network for every term, without a product of the two",
        tolerance=_CLOSE,
    ),
    "calculator-baseline": Spec(
        network="FeedForward",
        arguments={"units": [30, 30]},
        recipe=_recipe(1e-3, epochs=50, patience=None),
        resampled=True,
        description=f"The baseline of paper 000's benchmark, two layers of 30: {_OUTSIDE}",
        tolerance=_CLOSE,
    ),
    "calculator-fnn2": Spec(
        network="FeedForward",
        arguments={"units": [345]},
        recipe=_ADAM,
        description=f"FNN2 of paper 000: {_OUTSIDE}",
        tolerance=_CLOSE,
        paper=Paper(0.0389406, 0.0155504, 2.2301364, 0.2509270, 6.2929916, 6.6345832),
    ),
    "calculator-fnn3": Spec(
        network="FeedForward",
        arguments={"units": [494], "positional_encoding": True},
        recipe=_ADAM,
        description=f"FNN3 of paper 000, FNN2 with a positional encoding: {_OUTSIDE}",
        tolerance=_CLOSE,
        paper=Paper(0.034600, 0.013438, 2.504607, 0.290885, 6.116872, 6.672521),
    ),
    "calculator-rnn2": Spec(
        network="Rnn",
        arguments={"units": 269},
        recipe=_ADAM,
        description=f"RNN2 of paper 000: {_OUTSIDE}",
        paper=Paper(0.2730647, 0.1135200, 3.5727410, 0.3472042, 6.0766930, 0.4793787),
    ),
    "calculator-rnn-prelu": Spec(
        network="PreluRnn",
        arguments={"units": 269},
        recipe=_ADAM,
        description=f"The RNN of paper 000's section 1.1, as wide as RNN2: {_OUTSIDE}",
    ),
    "calculator-lstm": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "LSTM", "units": 35},
        recipe=_ATTENTIVE,
        description=f"The LSTM with attention behind paper 000's row 'Bidirectional LSTM': {_OUTSIDE}",
        paper=Paper(0.5908327, 0.2712299, 3.2350100, 0.3404062, 2.7806435, 1.7374969, other_code=True),
    ),
    "calculator-lstm-public": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "LSTM", "units": 35},
        recipe=_PUBLIC_LSTM,
        resampled=True,
        validated=False,
        description=f"The LSTM with attention, trained as in paper 000's code: {_OUTSIDE}",
    ),
    "calculator-lstm128": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "LSTM", "units": 128},
        recipe=_ATTENTIVE,
        description=f"The LSTM with attention, as wide as the bidirectional one: {_OUTSIDE}",
    ),
    "calculator-bilstm18": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "LSTM", "units": 18, "bidirectional": True},
        recipe=_ATTENTIVE,
        description=f"A bidirectional LSTM with attention, as wide as the one in one direction: {_OUTSIDE}",
    ),
    "calculator-bilstm": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "LSTM", "units": 64, "bidirectional": True},
        recipe=_ATTENTIVE,
        description=f"The bidirectional LSTM with attention of paper 000's text: {_OUTSIDE}",
    ),
    "calculator-gru": Spec(
        network="AttentiveRecurrent",
        arguments={"cell": "GRU", "units": 35},
        recipe=_ATTENTIVE,
        description=f"The GRU of paper 000's equations 7 to 10, with attention: {_OUTSIDE}",
    ),
    "calculator-transformer4": Spec(
        network="Transformer",
        arguments={"dim": 32, "num_layers": 3, "num_heads": 8, "hidden": 128},
        recipe=_transformer_recipe(1.4189e-3),
        description=f"transformer4 of paper 000: {_OUTSIDE}",
        paper=Paper(0.0448075, 0.0188047, 4.5702314, 0.5201459, 6.1630590, 2.8882827),
    ),
    "calculator-transformer5": Spec(
        network="Transformer",
        arguments={"dim": 64, "num_layers": 6, "num_heads": 8, "hidden": 512},
        recipe=_transformer_recipe(3.3548e-4),
        description=f"transformer5 of paper 000: {_OUTSIDE}",
        paper=Paper(0.0381983, 0.0151836, 4.9287004, 0.5431157, 6.0680327, 5.2896368),
    ),
    "calculator-transformer0": Spec(
        network="Transformer",
        arguments={"dim": 512, "num_layers": 6, "num_heads": 8, "hidden": 2048},
        recipe=_transformer_recipe(1.4189e-3),
        description="A transformer of the size of Vaswani et al., 2017: a negative control, which learns nothing here",
        tolerance=Tolerance(atol=1e-3, rtol=1e-4),
    ),
}
NAMES = tuple(SPECS)
#: Another recurrence of RNN2, another training of the LSTM, other widths of both LSTMs, and a transformer that takes
#: half an hour.
CONTROLS = tuple(f"calculator-{name}" for name in ("rnn-prelu", "lstm-public", "lstm128", "bilstm18", "transformer0"))
#: What ``fewheads train calculator`` trains.
DEFAULT_NAMES = tuple(name for name in NAMES if name not in CONTROLS)
