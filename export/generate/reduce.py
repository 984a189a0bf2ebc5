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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace

from edge.errors import Raw, UsageError
from export.generate.bundle import origin_of
from export.generate.evaluate import encode_fitting, teacher_forced, token_measures
from export.generate.files import tokenizer_files
from export.generate.model import identity_of, load_backbone, positions_of, save_backbone
from export.generate.ranking import (
    NEURON_BLOCK,
    Calibration,
    OnPart,
    blocks_to_remove,
    by_calibration,
    kept_counts,
)
from export.generate.sublayers import Sublayer, left_parameters
from export.generate.tokenizer import EncodedExample, TextTokenizer
from export.generate.train import Corpus, records
from export.models.transformer import LayerShape
from export.reduce.algebra import Fit, kept_columns, least_squares
from export.reduce.calibration import Features
from export.reduce.plan import LayerPlan, LayerReport, ReducedModel, ReducedRun, ReductionPlan
from export.training.device import DeviceName, device_of
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name of the model in the record.
MODEL = "reduced-language-model"


def reduce_directory(
    source: Path,
    corpus: Corpus,
    directory: Path,
    heads: float = 1.0,
    neurons: float = 1.0,
    *,
    texts: int,
    seed: int,
    device: DeviceName = "cpu",
    on_part: OnPart = lambda work, done, parts: None,
) -> ReducedRun:
    """Reduce the model in a directory, measure it on the hold-out, and write it as a directory of the same kind.

    The result has the original's shapes; removed heads and neurons are zeros, which an export drops. The files of the
    tokenizer stay as they are. It has ``training.json``, with what was removed, and ``metrics.json``, too.

    Args:
        directory: path of the new model; an earlier one there is replaced when this one is done.
        heads, neurons: shares of all heads of keys and values, and of all neurons, that stay.
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
    reduced = reduce_decoder(model, rows, heads, neurons, seed=seed, on_part=on_part)
    measures = (*token_measures("holdout", teacher_forced(model, holdout)), *before)
    metrics = RunMetrics(left_parameters(model), 0, 0, time.perf_counter() - begun, measures)
    arguments: dict[str, Any] = {"name": directory.name, "heads": heads, "neurons": neurons}
    arguments["layers"] = [_recorded(report) for report in reduced.reports]
    made = provenance(
        trainer=f"reduction to {heads:g} of the heads and {neurons:g} of the neurons of "
        f"{origin_of(identity_of(source))}",
        data=f"{corpus.described}; {len(rows)} for calibration",
        seed=seed,
    )
    config = RunConfig(MODEL, arguments, made, processor=processor())
    save_backbone(model.cpu(), tokenizer, directory, unchanged | records(config, metrics))
    return ReducedRun(str(directory), reduced.reports, metrics)


def reduce_decoder(
    model: PreTrainedModel,
    rows: Sequence[EncodedExample],
    heads: float = 1.0,
    neurons: float = 1.0,
    *,
    seed: int = 0,
    on_part: OnPart = lambda work, done, parts: None,
) -> ReducedModel[PreTrainedModel]:
    """Remove heads and neurons of a model in place; arguments and errors as :func:`reduce_directory`."""
    calibration = Calibration(model, rows)
    layers = calibration.layers
    fewer_heads = blocks_to_remove("--heads", [attention.groups for attention, _ in layers], heads, 1)
    fewer_neurons = blocks_to_remove("--neurons", [of.groups for _, of in layers], neurons, NEURON_BLOCK)
    if not fewer_heads + fewer_neurons:
        given, expected = Raw(f"{heads:g} and {neurons:g}"), "shares that remove something"
        raise UsageError("--heads and --neurons", given=given, expected=expected, fix="Give a smaller share.")
    removals = by_calibration(copy(calibration), seed, on_part)  # which uses up what it gets
    of_heads, of_neurons = zip(*removals, strict=True)
    counts = zip(kept_counts(of_heads, fewer_heads), kept_counts(of_neurons, fewer_neurons, NEURON_BLOCK), strict=True)
    dense = tuple(LayerShape(len(a.features), a.features.shape[1], len(f.features)) for a, f in layers)
    plans = []
    for shape, of_layer, count in zip(dense, removals, counts, strict=True):
        chosen = [removal.kept(number) for removal, number in zip(of_layer, count, strict=True)]
        plans.append(LayerPlan(LayerShape(count[0], shape.head_dim, count[1]), *chosen))
    plan = ReductionPlan(layers[0][0].weight.shape[1], dense, tuple(plans))
    reports = []
    for number, (layer, planned) in enumerate(zip(layers, plan.layers, strict=True)):
        assert planned is not None
        errors = []
        for sublayer, kept in zip(layer, (planned.heads, planned.neurons), strict=True):
            (features,) = calibration.features(number, [sublayer])
            errors.append(_remove(sublayer, kept or (), features))
        calibration.advance(number)
        scores = of_heads[number].errors.diff()[torch.tensor(of_heads[number].order).argsort()]
        report = LayerReport(planned, number=number, head_scores=tuple(scores.tolist()))
        reports.append(replace(report, attention_error=errors[0], feed_forward_error=errors[1]))
        on_part("removing", number + 1, len(layers))
    return ReducedModel(model, plan, tuple(reports))


def _recorded(report: LayerReport) -> dict[str, Any]:
    """Return what the record of a directory has of a layer."""
    return {
        "heads": report.plan.heads,
        "neurons": report.plan.shape.ffn_dim,
        "attention_error": report.attention_error,
        "feed_forward_error": report.feed_forward_error,
        "head_scores": report.head_scores,
    }


def _remove(sublayer: Sublayer, kept: tuple[int, ...], features: Features) -> float:
    """Remove all other groups, and return the relative error of the output on the calibration texts."""
    if len(kept) == sublayer.groups:
        return 0.0
    C, W = features.covariance, sublayer.weight
    B = kept_columns(len(C), kept, sublayer.features.shape[1])
    fit = Fit.of(W, B, least_squares(C, W, B), features.mean, C)
    sublayer.remove(sorted({*range(sublayer.groups)} - {*kept}))
    sublayer.fill(B @ fit.weight, fit.shift)
    return fit.error
