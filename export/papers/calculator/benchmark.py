"""Errors of the calculators on every split, and the benchmark: a score of our own, and paper 000's formula.

Both divide the errors of a baseline by those of a predictor. The paper trains its baseline anew for each column of its
table; here it is frozen: the mean of ten seeds of ``calculator-baseline``, in ``baseline.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.files import sha256
from export.data.expressions import LONG_TERMS, Split, load
from export.papers.calculator.specs import SPECS
from export.training.intervals import draws, mean, mean_measure, middle, resampled

EVALUATED = ("val", "in_range", "out_of_range", "long")
BASELINE_MODEL = "calculator-baseline"
BASELINE = Path(__file__).with_name("baseline.json")
#: The metrics, and their split: they combine several.
SCORE, PAPER_SCORE, SPLIT = "score", "paper_score", "benchmark"
#: Smaller errors count as this one: it is about one unit in the last place of FP32 for values from 8 to 16, and without
#: it the score of a perfect network would be infinite.
FLOOR = 1e-6
#: Numbers of terms above that of the training items, which is 3.
NEW_LENGTHS = range(4, 9)
_SCORED = ("mae_in_range", "mae_out_of_range", "mae_long", "mre_out_of_range")
_LARGE_SUM, _PAPER_LENGTH = 22, 4


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean absolute (``mae``) and relative errors (``mre``) of a predictor; relative ones take zeros of the truth as 1.

    Attributes:
        mae_long: the mean over the lengths from 4 to 8 terms, each of the same weight.
        mae_sum_22: over the 192 items out of range whose operands' absolute values add up to 22.
        mae_4_terms: over the 100 long items of 4 terms.
        mre_both: over the items in range and out of range together.
    """

    mae_in_range: float
    mae_out_of_range: float
    mae_long: float
    mre_out_of_range: float
    mae_sum_22: float
    mae_4_terms: float
    mre_both: float


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen baseline.

    Attributes:
        definition: what its runs were trained on, and how; see :func:`definition`.
        seeds: the errors of each run, by seed.
    """

    definition: str
    seeds: dict[int, Errors]

    @property
    def mean(self) -> Errors:
        """The mean over the seeds; a score of 1."""
        return Errors(*np.mean([msgspec.structs.astuple(errors) for errors in self.seeds.values()], axis=0).tolist())


@cache
def baseline() -> Baseline:
    """Return the frozen baseline."""
    return msgspec.json.decode(BASELINE.read_bytes(), type=Baseline)


def definition() -> str:
    """Return the SHA-256 of all that the frozen baseline depends on: its network, its recipe and the splits.

    Settings of the recipe count where they differ from the defaults, so that a new one changes nothing.
    """
    spec = SPECS[BASELINE_MODEL]
    fields = msgspec.structs.fields(spec.recipe) if spec.recipe else ()
    recipe = {
        field.name: value for field in fields if (value := getattr(spec.recipe, field.encode_name)) != field.default
    }
    splits = {name: (split.expressions, split.truth.tolist()) for name, split in load().items()}
    return sha256(msgspec.json.encode((spec.network, spec.arguments, spec.resampled, recipe, splits), order="sorted"))


def errors_of(values: Mapping[str, Array], splits: Mapping[str, Split]) -> Errors:
    """Return the errors of predicted values [n], by split."""
    return Errors(**{name: float(error) for name, error in _means(*_items(values, splits)).items()})


def score(errors: Errors, base: Errors) -> float:
    """Return the geometric mean, over four errors, of the baseline's error over the predictor's; 1 is the baseline.

    The errors are those in range, out of range (absolute and relative) and on long expressions. Errors below
    :data:`FLOOR` count as that.
    """
    return float(_score(msgspec.structs.asdict(errors), base))


def paper_score(errors: Errors, base: Errors) -> float:
    """Return paper 000's score, which it does not define: the formula is that of its public code but for the LSTM.

    It is the mean of four ratios of squares: in range, the sum 22, 4 terms, and the relative error. As in that code,
    the last one divides the baseline's error on both splits together by the predictor's out of range alone. Unlike
    there, errors on 4 terms are absolute values of differences. Errors below :data:`FLOOR` count as that.

    For the LSTM, that code divides by the mean, over the items in range, of half the sum of ``mre_out_of_range`` and
    ``mae_in_range`` / y, with the sign of y, and 1 for zeros. With the paper's figures, this last term is 3.2 times as
    large.
    """
    return float(_paper_score(msgspec.structs.asdict(errors), base))


def paper_long(values: Mapping[str, Array], splits: Mapping[str, Split]) -> float:
    """Return what paper 000's code reports as the error on long expressions.

    It subtracts answers to expressions *in range* from absolute values of the truth for long ones. Which answer meets
    which item depends on the order of a Python set; this is the mean over all pairs.
    """
    return float(np.abs(splits["long"].truth).mean() - values["in_range"].mean())


def evaluate(predict: Callable[[Array], Array], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Measure a predictor, which maps tokens [n, 15] to values [n, 1], on every split but ``train``; see below."""
    return measured({name: predict(splits[name].tokens)[:, 0] for name in EVALUATED}, splits)


def measured(values: Mapping[str, Array], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Return the measures of predicted values [n], by split.

    Metrics: ``mae`` is mean |e| and ``mre`` mean |e| / |y|, zeros of y taken as 1, as in paper 000, both with bootstrap
    intervals; ``exact_match`` is the share of answers that are right once rounded, with Wilson's interval. Beside each
    split as a whole there are ``long/2`` … ``long/8`` by number of terms, ``long/4-8``, the mean over those lengths,
    which are new to the predictor, and ``long/with_5`` and ``long/without_5`` by whether the unseen operand 5 occurs.
    ``benchmark`` has both scores, with intervals over the items; the baseline is fixed.
    """
    measures: list[Measure] = []
    for name in EVALUATED:
        split = splits[name]
        parts = {("mae", name): [_absolute(values, split)], ("mre", name): [_relative(values, split)]}
        if name == "long":
            errors, unseen = _absolute(values, split), split.has_unseen_operand
            by_terms = {terms: errors[split.terms == terms] for terms in LONG_TERMS}
            parts |= {("mae", f"long/{terms}"): [part] for terms, part in by_terms.items()}
            parts["mae", "long/4-8"] = [by_terms[terms] for terms in NEW_LENGTHS]
            parts |= {("mae", "long/with_5"): [errors[unseen]], ("mae", "long/without_5"): [errors[~unseen]]}
        of_split = [_mean(*key, strata) for key, strata in parts.items()]
        of_split.insert(2, mean_measure("exact_match", name, np.rint(values[name]) == split.truth))
        measures += of_split
    return (*measures, *_scores(values, splits))


def _mean(metric: str, split: str, strata: list[Array]) -> Measure:
    """Return the mean of the strata's mean errors, with the interval from resampling each of them."""
    generator = np.random.default_rng(0)
    means = np.mean([resampled(mean, errors, generator=generator) for errors in strata], axis=0)
    value = float(np.mean([errors.mean() for errors in strata]))
    return Measure(metric=metric, split=split, value=value, n=sum(map(len, strata)), interval=middle(means))


def _scores(values: Mapping[str, Array], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    items, base = _items(values, splits), baseline().mean
    generator = np.random.default_rng(0)
    chunks = zip(*(draws(part.shape[-1], generator) for part in items), strict=True)
    drawn = [_means(*(part[:, rows] for part, rows in zip(items, chunk, strict=True))) for chunk in chunks]
    means = {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}
    errors, number = errors_of(values, splits), sum(part.shape[-1] for part in items)
    return tuple(
        Measure(metric=metric, split=SPLIT, value=of(errors, base), n=number, interval=middle(of_means(means, base)))
        for metric, of, of_means in ((SCORE, score, _score), (PAPER_SCORE, paper_score, _paper_score))
    )


def _items(values: Mapping[str, Array], splits: Mapping[str, Split]) -> list[Array]:
    """Return what :func:`_means` takes, with the items along the last axis."""
    in_range, out, long = (splits[name] for name in ("in_range", "out_of_range", "long"))
    large = [sum(abs(int(operand)) for operand in text.split()[::2]) == _LARGE_SUM for text in out.expressions]
    on_long = _absolute(values, long)
    return [
        np.stack([_absolute(values, in_range), _relative(values, in_range)]),
        np.stack([_absolute(values, out), _relative(values, out), np.array(large, float)]),
        *(on_long[None, long.terms == terms] for terms in NEW_LENGTHS),
    ]


def _absolute(values: Mapping[str, Array], split: Split) -> Array:
    return np.abs(values[split.name].astype(np.float64) - split.truth)


def _relative(values: Mapping[str, Array], split: Split) -> Array:
    return _absolute(values, split) / np.abs(np.where(split.truth == 0, 1, split.truth))


def _means(in_range: Array, out_of_range: Array, *long: Array) -> dict[str, Array]:
    """Return the errors of items, or of resamples of them.

    Args:
        in_range: absolute and relative errors, [2, ..., n].
        out_of_range: the same, and 1 where the sum is 22, [3, ..., m].
        long: absolute errors of each length, [1, ..., 100].
    """
    (mae_in_range, mre_in_range), (mae_out_of_range, mre_out_of_range, large) = (
        part.mean(axis=-1) for part in (in_range, out_of_range)
    )
    by_length = dict(zip(NEW_LENGTHS, (part[0].mean(axis=-1) for part in long), strict=True))
    sizes = [in_range.shape[-1], out_of_range.shape[-1]]
    return {
        "mae_in_range": mae_in_range,
        "mae_out_of_range": mae_out_of_range,
        "mae_long": np.mean(list(by_length.values()), axis=0),
        "mre_out_of_range": mre_out_of_range,
        "mae_sum_22": (out_of_range[0] * out_of_range[2]).mean(axis=-1) / large,
        "mae_4_terms": by_length[_PAPER_LENGTH],
        "mre_both": np.average([mre_in_range, mre_out_of_range], axis=0, weights=sizes),
    }


def _score(errors: Mapping[str, Array], base: Errors) -> Array:
    return np.asarray(np.exp(np.mean([np.log(_ratio(base, errors, name, name)) for name in _SCORED], axis=0)))


def _paper_score(errors: Mapping[str, Array], base: Errors) -> Array:
    pairs = (("mae_in_range",) * 2, ("mae_sum_22",) * 2, ("mae_4_terms",) * 2, ("mre_both", "mre_out_of_range"))
    return np.asarray(np.mean([_ratio(base, errors, name, other) ** 2 for name, other in pairs], axis=0))


def _ratio(base: Errors, errors: Mapping[str, Array], of_base: str, of_predictor: str) -> Array:
    return np.asarray(getattr(base, of_base) / np.maximum(errors[of_predictor], FLOOR))
