"""Results of the comparison, as ``results.json`` has them."""

from __future__ import annotations

import msgspec

from edge.bundles.manifest import Measure
from export.papers.calculator.specs import Paper
from export.training.provenance import Processor


class Spread(msgspec.Struct, frozen=True):
    """The median of repeated measurements, and the least and the most of them."""

    median: float
    least: float
    most: float


class Latency(msgspec.Struct, frozen=True):
    """Median latencies in ms of requests of some expressions, over rounds.

    Attributes:
        served: from a client's call to its answer, through the server.
        in_process: of preprocessing and the runtime alone.
        served_ratio: of the served latency to that of the reference model in the same round.
        in_process_ratio: the same of the other.
    """

    served: Spread
    in_process: Spread
    served_ratio: Spread
    in_process_ratio: Spread


class Cost(msgspec.Struct, frozen=True):
    """What a model costs.

    Attributes:
        mflop: 10⁶ operations of matrix products for one expression.
        onnx_bytes: size of the ONNX file.
        memory_bytes: resident memory that a copy of the model adds to a process with the runtime and another copy;
            None where it was not measured.
        latencies: by the number of expressions of a request; empty where they were not measured.
    """

    mflop: float
    onnx_bytes: int
    memory_bytes: Spread | None = None
    latencies: dict[int, Latency] = {}


class Against(msgspec.Struct, frozen=True):
    """Welch's t-test of the logarithms of two models' scores, over their seeds.

    Attributes:
        ratio: of the models' scores, which are geometric means.
        p: two-sided; None where a model has one seed, or no scores differ.
    """

    other: str
    ratio: float
    p: float | None


class ModelResult(msgspec.Struct, frozen=True):
    """Results of a model.

    Attributes:
        runs: names of the directories.
        seeds: their number; 1 for a network that is constructed.
        measures: means over the seeds with Student's intervals, or of one seed with intervals over the items. The
            scores are geometric means.
        paper: published figures, if any.
        paper_long: what paper 000's code reports as the error on long expressions, if it meets these answers.
        paper_scores: the least and the largest score by the paper's formula, if one seed of the baseline after the
            other is the denominator.
    """

    name: str
    runs: tuple[str, ...]
    parameters: int
    seeds: int
    measures: tuple[Measure, ...]
    paper: Paper | None
    paper_long: float
    paper_scores: tuple[float, float]
    against: tuple[Against, ...]
    cost: Cost

    def measure(self, metric: str, split: str) -> Measure:
        """Return one of the measures."""
        return next(one for one in self.measures if (one.metric, one.split) == (metric, split))


class Settings(msgspec.Struct, frozen=True):
    """Settings of the measurements of latency."""

    requests: int
    rounds: int


class Results(msgspec.Struct, frozen=True):
    """All results.

    Attributes:
        reference: the model that latencies are relative to.
        processor: that measured the latencies.
    """

    settings: Settings
    reference: str
    models: tuple[ModelResult, ...]
    processor: Processor
