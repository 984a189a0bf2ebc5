"""Export of fine-tuned runs to one bundle for texts or pairs of texts: a tier for each run, and its INT8 twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import (
    Artifact,
    LabelPostprocess,
    Manifest,
    Measure,
    Profile,
    ScorePostprocess,
    Tier,
    TokenizerPreprocess,
)
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.datatypes import Array, TensorSpec
from edge.errors import Literally, UsageError
from export.convert import golden_of
from export.exported import RUNTIMES, Exported
from export.heads import SequenceClassifier
from export.provenance import provenance
from export.quantization.ranges import InputRange
from export.quantization.training import trained_ranges
from export.runs import TOKENIZER
from export.runtimes import ExportedArtifact, export_tier, files_of
from export.tasks.calibration import CALIBRATION_ROWS
from export.tasks.examples import limited, split_holdout
from export.tasks.file_accuracy import OnRows, in_tier, tier_measures
from export.tasks.glue import TASKS, GlueTask, read
from export.tasks.models import SCORE, Architecture, open_model
from export.tasks.predictions import read_predictions
from export.tasks.tokens import load_tokenizer

MAX_BATCH_SIZE = 32
GOLDEN_ROWS = 32
_MAX_TEXT_BYTES = 16 * 1024
_PAD_ID = 0
_TEXTS = ("text", "text_pair")
_IDS, _MASK, _SEGMENTS, _LOGITS = "input_ids", "attention_mask", "token_type_ids", "logits"
#: Their names in :attr:`export.tasks.tokens.Batch.named`.
_BATCH_NAMES = {_IDS: "inputs", _MASK: "mask", _SEGMENTS: "segments"}
#: Usual tokens of a text, which runtimes tune for.
_USUAL_TOKENS = 32
#: Names of the class numbers in the files (Wang et al. 2019).
LABELS = {
    "SST-2": ("negative", "positive"),
    "CoLA": ("unacceptable", "acceptable"),
    "MRPC": ("not_equivalent", "equivalent"),
    "WNLI": ("not_entailment", "entailment"),
    "QQP": ("not_duplicate", "duplicate"),
}


class _Source(NamedTuple):
    tier: str
    path: Path
    model: SequenceClassifier
    architecture: Architecture
    measures: tuple[Measure, ...]
    trained: dict[str, InputRange]


def export_classifier(
    runs: Sequence[Path],
    repository: str | Path,
    name: str,
    data_dir: str | Path,
    *,
    tiers: Sequence[str],
    version: int = 1,
    artifacts: Sequence[str] = RUNTIMES,
    replace: bool = False,
    on_rows: OnRows | None = None,
) -> Exported:
    """Write runs on one task as the tiers of one bundle, ``repository/<name>-<version>``.

    Args:
        runs: of ``fewheads finetune`` or ``fewheads reduce``, the full model first.
        data_dir: golden and calibration texts are from the task's training set there.
        tiers: a name for each run; each tier has a twin in INT8, ``<tier>-int8``.
        artifacts: of :data:`export.exported.RUNTIMES`.
        on_rows: called while the files in INT8 are measured on the hold-out and dev; None measures none of them.

    Raises:
        UsageError: a run is not a classifier or regression of texts, or the runs are of different tasks.
    """
    sources = [_source(run, tier) for run, tier in zip(runs, tiers, strict=True)]
    first = sources[0]
    task = _one_task(sources)
    definition = load_tokenizer(first.path).to_str().encode()
    pair = len(task.texts) == 2
    config = TokenizerPreprocess(
        input=_TEXTS[0],
        file=TOKENIZER,
        ids=_IDS,
        mask=_MASK,
        max_length=first.architecture.max_length,
        pad_id=_PAD_ID,
        max_text_bytes=_MAX_TEXT_BYTES,
        pair=_TEXTS[1] if pair else None,
        # A single text is segment 0, a constant of the graph.
        segments=_SEGMENTS if pair and first.architecture.transformer.segments else None,
    )
    tokenize = TokenizerPreprocessor(config, definition, str(first.path / TOKENIZER))
    train, holdout = split_holdout(read(task, data_dir, "train"))
    texts = _columns(limited(holdout, GOLDEN_ROWS).texts)
    raw = {name: column.astype(np.bytes_) for name, column in zip(_TEXTS, texts, strict=False)}
    inputs = tokenize(*texts)
    # One at a time: padding must not enter the ranges.
    calibration = [tokenize(*_columns([row])) for row in limited(train, CALIBRATION_ROWS).texts]
    files = {TOKENIZER: definition}
    made: list[Tier] = []
    measures: list[Measure] = []
    largest = 0.0
    for source in sources:
        trained = source.trained or None
        files_made = export_tier(source.model, inputs, calibration, [_LOGITS], name=source.tier, trained=trained)
        exported = _chosen(files_made, artifacts, source.tier)
        golden = golden_of(source.model, inputs, [_LOGITS])
        golden_file = f"{source.tier}.golden.npz"
        files[golden_file] = msgspec.structs.replace(golden, raw=raw).encode()
        files |= files_of(exported)
        measures += _measures(task, source, exported, data_dir, on_rows)
        made += _tiers(source.tier, exported, golden_file)
        largest = max(largest, *(one.largest_difference for one in exported))
    usual = min(_USUAL_TOKENS * len(task.texts), config.max_length)
    shape = Profile(min=(1, 1), opt=(1, usual), max=(MAX_BATCH_SIZE, config.max_length))
    labels = LABELS.get(task.name, task.labels)
    manifest = Manifest(
        name=name,
        version=version,
        description=f"{task.name} of GLUE: {' or '.join(labels) or 'a score from 0 to 5'}",
        inputs=tuple(TensorSpec(tensor, "INT64", (-1, -1)) for tensor in config.outputs),
        outputs=(TensorSpec(_LOGITS, "FP32", (-1, len(labels) or 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={tensor: shape for tensor in config.outputs},
        tiers=tuple(made),
        golden=f"{first.tier}.golden.npz",
        files={},
        provenance=provenance(trainer=", ".join(run.name for run in runs), data=f"GLUE {task.name}", seed=None),
        preprocess=config,
        postprocess=(
            LabelPostprocess(logits=_LOGITS, output="label", labels=labels)
            if labels
            else ScorePostprocess(logits=_LOGITS, output=SCORE)
        ),
        measures=tuple(measures),
    )
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported(
        str(written.path), largest, sum(len(data) for file, data in files.items() if file.endswith(".onnx"))
    )


def _source(run: Path, tier: str) -> _Source:
    found = open_model(run)
    if found.architecture is None or not isinstance(found.head, SequenceClassifier):
        fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on a task of GLUE."
        raise UsageError(f"run {run}", given=Literally("no classifier"), expected="a classifier of texts", fix=fix)
    measures = found.metrics.measures if found.metrics else ()
    return _Source(tier, run, found.head, found.architecture, measures, trained_ranges(found.int8))


def _measures(
    task: GlueTask, source: _Source, exported: Sequence[ExportedArtifact], data_dir: str | Path, on_rows: OnRows | None
) -> list[Measure]:
    """Return the recorded measures of a run, and those of its files in INT8.

    What a run that was trained for INT8 has recorded is of INT8, so its other file is measured, too.
    """
    measures = in_tier(source.measures, f"{source.tier}-int8" if source.trained else source.tier)
    if on_rows is None:
        return measures
    tokenizer, length = load_tokenizer(source.path), source.architecture.max_length
    splits = task.prepare(data_dir, tokenizer, max_length=length, limit=None).measured
    recorded = {} if source.trained else {split: read_predictions(source.path, split) for split in splits}
    for split, predictions in recorded.items():
        number, found = len(predictions.targets), len(splits[split].targets)
        if number != found:
            subject, expected = f"{split} of {task.name} in {data_dir}", f"{number} texts, as the run was measured on"
            fix = "Give the --data-dir that the run was trained with, or --no-measure."
            raise UsageError(subject, given=Literally(f"{found} texts"), expected=expected, fix=fix)
    made = tier_measures(task, source.tier, exported, splits, recorded, names=_BATCH_NAMES, on_rows=on_rows)
    return made if source.trained else [*measures, *made]


def _one_task(sources: Sequence[_Source]) -> GlueTask:
    names = sorted({source.architecture.task for source in sources})
    if len(names) > 1 or names[0] not in TASKS:
        fix = "Export runs of one task of these; runs of another become a bundle of their own."
        raise UsageError("task of the runs", given=names, expected=f"one of {', '.join(TASKS)}", fix=fix)
    return TASKS[names[0]]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[Array]:
    """Return the first texts of all rows, and of pairs the second ones, as BYTES [rows, 1]."""
    return [np.array([[text.encode()] for text in column], np.object_) for column in zip(*rows, strict=True)]


def _chosen(exported: Sequence[ExportedArtifact], artifacts: Sequence[str], tier: str) -> list[ExportedArtifact]:
    """Return the files for the chosen runtimes; both precisions of the tier must be among them."""
    chosen = [one for one in exported if one.artifact.runtime in ("any", *artifacts)]
    for int8 in (False, True):
        if not any((one.artifact.precision == "int8") == int8 for one in chosen):
            subject = f"tier {tier}{'-int8' if int8 else ''}"
            expected = f"a file for one of {', '.join(sorted({one.artifact.runtime for one in exported}))}"
            fix = "Give another --artifacts, or leave it out."
            raise UsageError(subject, given=list(artifacts), expected=expected, fix=fix)
    return chosen


def _tiers(name: str, exported: Sequence[ExportedArtifact], golden: str) -> list[Tier]:
    """Return the tier and its INT8 twin: a runtime reads one file of a tier, so precision is a choice of tier."""
    by_precision: dict[bool, list[Artifact]] = {False: [], True: []}
    for one in exported:
        by_precision[one.artifact.precision == "int8"].append(one.artifact)
    return [
        Tier(name=name, artifacts=tuple(by_precision[False]), golden=golden),
        Tier(name=f"{name}-int8", artifacts=tuple(by_precision[True]), golden=golden),
    ]
