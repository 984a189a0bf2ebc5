"""Reduction of a language model: fewer heads and fewer neurons in the directory of a model of transformers.

One ranking of all layers (:mod:`export.generate.ranking`) decides which heads and how many neurons each of them keeps.
Then each layer is calibrated on the outputs of the smaller layers before it, and the weights that stay are fitted by
least squares to what the whole layer returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from edge.errors import Raw, UsageError
from export.generate.bundle import origin_of
from export.generate.evaluate import encode_fitting, teacher_forced, token_measures
from export.generate.files import tokenizer_files
from export.generate.model import identity_of, load_backbone, positions_of, save_backbone
from export.generate.ranking import (
    NEURON_BLOCK,
    Calibration,
    Features,
    OnPart,
    blocks_to_remove,
    by_calibration,
    by_magnitude,
    kept_counts,
)
from export.generate.sublayers import Sublayer, left_parameters
from export.generate.tokenizer import Encoded, TextTokenizer
from export.generate.train import Corpus, records
from export.reduce.algebra import kept_columns, least_squares, output_error
from export.training.device import DeviceName, device_of
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: By calibration, or as a baseline by the size of the weights, without a fit of what stays.
Method = Literal["calibrated", "magnitude"]

#: Name of the model in the record.
MODEL = "reduced-language-model"


class Shares(msgspec.Struct, frozen=True):
    """Shares of all heads of keys and values, and of all neurons, that stay."""

    heads: float = 1.0
    neurons: float = 1.0


class ReducedLayer(msgspec.Struct, frozen=True):
    """Result of reducing a layer.

    Attributes:
        heads: the original heads of keys and values that stay, ascending.
        neurons: how many hidden units stay.
        attention_error: mean square of the change of the attention's output on the calibration texts, relative to that
            of the output.
        feed_forward_error: the same for the feed-forward.
        head_scores: of each original head, the loss of its removal after the heads that go before it: the mean square
            by which it moves the logits; by magnitude, the square of its weights.
    """

    heads: tuple[int, ...]
    neurons: int
    attention_error: float
    feed_forward_error: float
    head_scores: tuple[float, ...]


class Reduced(msgspec.Struct, frozen=True):
    """Result of a reduction: the new directory, its layers, and metrics, those of the splits "holdout" and "before"."""

    directory: str
    layers: tuple[ReducedLayer, ...]
    metrics: RunMetrics


def reduce_directory(
    source: Path,
    corpus: Corpus,
    directory: Path,
    shares: Shares,
    *,
    method: Method = "calibrated",
    texts: int,
    seed: int,
    device: DeviceName = "cpu",
    on_part: OnPart = lambda work, done, parts: None,
) -> Reduced:
    """Reduce the model in a directory, measure it on the hold-out, and write it as a directory of the same kind.

    The result has the original's shapes; removed heads and neurons are zeros, which an export drops. The files of the
    tokenizer stay as they are. It has ``training.json``, with what was removed, and ``metrics.json``, too.

    Args:
        directory: path of the new model; an earlier one there is replaced when this one is done.
        texts: of the corpus's training part, for the calibration.
        seed: draws these texts, and weights of logits in the measurement of sensitivities.

    Raises:
        UsageError: a share leaves a layer without heads or neurons, or nothing would be removed.
        ReductionError: there are too few texts, or an activation is not finite.
        CheckpointError: the source is no language model.
    """
    begun = time.perf_counter()
    model, tokenizer = load_backbone(source), TextTokenizer.load(source)
    unchanged = tokenizer_files(source)
    model.to(device_of(device))  # type: ignore[arg-type]
    chosen = np.random.default_rng(seed).permutation(len(corpus.train))[:texts]
    positions = positions_of(model)
    rows = encode_fitting(tokenizer, [corpus.train[number] for number in chosen], positions)
    holdout = encode_fitting(tokenizer, corpus.holdout, positions)
    before = token_measures("before", teacher_forced(model, holdout))
    layers, parameters = reduce_model(model, rows, shares, method=method, seed=seed, on_part=on_part)
    measures = (*token_measures("holdout", teacher_forced(model, holdout)), *before)
    metrics = RunMetrics(parameters, 0, 0, time.perf_counter() - begun, measures)
    arguments: dict[str, Any] = {"name": directory.name, "method": method}
    arguments |= msgspec.to_builtins(shares) | {"layers": msgspec.to_builtins(layers)}
    made = provenance(
        trainer=f"{method} reduction to {shares.heads:g} of the heads and {shares.neurons:g} of the neurons of "
        f"{origin_of(identity_of(source))}",
        data=f"{corpus.described}; {len(rows)} for calibration",
        seed=seed,
    )
    config = RunConfig(MODEL, arguments, made, processor=processor())
    save_backbone(model.cpu(), tokenizer, directory, unchanged | records(config, metrics))
    return Reduced(str(directory), layers, metrics)


def reduce_model(
    model: PreTrainedModel,
    rows: Sequence[Encoded],
    shares: Shares,
    *,
    method: Method = "calibrated",
    seed: int = 0,
    on_part: OnPart = lambda work, done, parts: None,
) -> tuple[tuple[ReducedLayer, ...], int]:
    """Remove heads and neurons of a model in place; arguments and errors as :func:`reduce_directory`.

    Returns:
        A report for each layer, and the number of parameters without those that were removed.
    """
    calibration = Calibration(model, rows)
    layers = calibration.layers
    fewer_heads = blocks_to_remove("--heads", [attention.groups for attention, _ in layers], shares.heads, 1)
    fewer_neurons = blocks_to_remove("--neurons", [of.groups for _, of in layers], shares.neurons, NEURON_BLOCK)
    if not fewer_heads + fewer_neurons:
        given, expected = Raw(f"{shares.heads:g} and {shares.neurons:g}"), "shares that remove something"
        raise UsageError("--heads and --neurons", given=given, expected=expected, fix="Give a smaller share.")
    # The ranking uses up what it gets.
    removals = by_magnitude(layers) if method == "magnitude" else by_calibration(copy(calibration), seed, on_part)
    heads = kept_counts([removal for removal, _ in removals], fewer_heads)
    neurons = kept_counts([removal for _, removal in removals], fewer_neurons, NEURON_BLOCK)
    reports = []
    for number, counts in enumerate(zip(heads, neurons, strict=True)):
        errors = []
        for sublayer, removal, count in zip(layers[number], removals[number], counts, strict=True):
            (features,) = calibration.features(number, [sublayer])
            errors.append(_remove(sublayer, removal.kept(count), features, fits=method == "calibrated"))
        calibration.advance(number)
        of_heads = removals[number][0]
        scores = dict(zip(of_heads.order, of_heads.errors.diff().tolist(), strict=True))
        head_scores = tuple(scores[head] for head in sorted(scores))
        reports.append(ReducedLayer(of_heads.kept(counts[0]), counts[1], errors[0], errors[1], head_scores))
        on_part("removing", number + 1, len(layers))
    return tuple(reports), left_parameters(model)


def _remove(sublayer: Sublayer, kept: tuple[int, ...], features: Features, *, fits: bool) -> float:
    """Remove all other groups, and return the relative error of the output on the calibration texts."""
    if len(kept) == sublayer.groups:
        return 0.0
    C, W = features.covariance, sublayer.weight
    B = kept_columns(len(C), kept, sublayer.features.shape[1])
    W_small = least_squares(C, W, B) if fits else B.T @ W
    lost = W - B @ W_small
    sublayer.remove(sorted({*range(sublayer.groups)} - {*kept}))
    if fits:
        sublayer.fill(B @ W_small, features.mean @ lost)
    whole = float((W * (C @ W)).sum())
    return output_error(C, W, B, W_small) / whole if whole > 0 else 0.0
