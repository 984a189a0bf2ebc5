"""From fine-tuned runs to one bundle that takes text: a tier for each run, and one more for each in INT8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundle import write_bundle
from edge.datatypes import Array, TensorSpec
from edge.errors import Literally, UsageError
from edge.golden import Golden
from edge.manifest import Artifact, LabelPostprocess, Manifest, Measure, Profile, Tier, TokenizerPreprocess
from edge.preprocess import TokenizerPreprocessor
from export.calculator.bundle import VERSION, Exported
from export.checkpoint import TOKENIZER
from export.convert import golden_of
from export.heads import SequenceClassifier
from export.provenance import provenance
from export.runtimes import ExportedArtifact, export_tier
from export.tasks.glue import TASKS, Task, limited, read, split_holdout
from export.tasks.models import Architecture, find
from export.tasks.tokens import load_tokenizer

MAX_BATCH_SIZE = 32
GOLDEN_ROWS, CALIBRATION_ROWS = 32, 128
_MAX_TEXT_BYTES = 16 * 1024
_PAD_ID = 0
_IDS, _MASK, _LOGITS = "input_ids", "attention_mask", "logits"
#: What the class numbers of the files mean (Wang et al. 2019).
LABELS = {"SST-2": ("negative", "positive"), "CoLA": ("unacceptable", "acceptable")}


class _Source(NamedTuple):
    """A run that becomes a tier."""

    tier: str
    path: Path
    model: SequenceClassifier
    architecture: Architecture
    measures: tuple[Measure, ...]


def export_classifier(
    runs: Sequence[Path], repository: str | Path, name: str, data_dir: str | Path, *, replace: bool = False
) -> Exported:
    """Write runs on one task as the tiers of one bundle, ``repository/<name>-1``.

    Args:
        runs: of ``fewheads finetune`` or ``fewheads reduce``, the full model first. The first tier is called ``full``,
            the others after their directories; each has a twin in INT8, ``<tier>-int8``.
        repository: the directory that holds bundles.
        name: of the model.
        data_dir: where the task's data are; golden and calibration texts are taken from its training set.
        replace: whether a bundle that stands there may be replaced.

    Raises:
        CheckpointError: a run cannot be read.
        DataError: the task's data cannot be read.
        UsageError: the runs are of different tasks, or of one that is no single text with labels.
        GoldenError: an ONNX file computes something else than torch does.
        BundleError: the bundle cannot be written.
    """
    sources = [_source(run, "full" if index == 0 else run.name.lower()) for index, run in enumerate(runs)]
    first = sources[0]
    task = _one_task(sources)
    definition = load_tokenizer(first.path).to_str().encode()
    config = TokenizerPreprocess(
        input="text",
        file=TOKENIZER,
        ids=_IDS,
        mask=_MASK,
        max_length=first.architecture.max_length,
        pad_id=_PAD_ID,
        max_text_bytes=_MAX_TEXT_BYTES,
    )
    tokenize = TokenizerPreprocessor(config, definition, str(first.path / TOKENIZER))
    train, holdout = split_holdout(read(task, data_dir, "train"))
    texts = _texts(limited(holdout, GOLDEN_ROWS).texts)
    inputs = tokenize(texts)
    calibration = tokenize(_texts(limited(train, CALIBRATION_ROWS).texts))
    files = {TOKENIZER: definition}
    tiers: list[Tier] = []
    largest = 0.0
    for source in sources:
        exported = export_tier(source.model, inputs, calibration, [_LOGITS], name=source.tier)
        golden = golden_of(source.model, inputs, [_LOGITS])
        golden_file = f"{source.tier}.golden.npz"
        files[golden_file] = Golden(golden.inputs, golden.outputs, {"text": texts.astype(np.bytes_)}).encode()
        files |= {one.artifact.file: one.data for one in exported}
        tiers += _tiers(source.tier, exported, golden_file)
        largest = max(largest, *(one.largest_difference for one in exported))
    shape = Profile(min=(1, 1), opt=(1, 32), max=(MAX_BATCH_SIZE, config.max_length))
    manifest = Manifest(
        format_version=1,
        name=name,
        version=VERSION,
        description=f"{task.name} of GLUE: {' or '.join(LABELS[task.name])}",
        inputs=tuple(TensorSpec(tensor, "INT64", (-1, -1)) for tensor in config.outputs),
        outputs=(TensorSpec(_LOGITS, "FP32", (-1, len(task.labels))),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={tensor: shape for tensor in config.outputs},
        tiers=tuple(tiers),
        golden=f"{first.tier}.golden.npz",
        files={},
        provenance=provenance(trainer=", ".join(run.name for run in runs), data=f"GLUE {task.name}", seed=None),
        preprocess=config,
        postprocess=LabelPostprocess(logits=_LOGITS, output="label", labels=LABELS[task.name]),
        measures=tuple(measure for source in sources for measure in _measures(source)),
    )
    written = write_bundle(Path(repository) / f"{name}-{VERSION}", manifest, files, replace=replace)
    return Exported(
        str(written.path), largest, sum(len(data) for file, data in files.items() if file.endswith(".onnx"))
    )


def _source(run: Path, tier: str) -> _Source:
    found = find(run)
    if found.architecture is None or not isinstance(found.head, SequenceClassifier):
        fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on SST-2 or CoLA."
        raise UsageError(f"run {run}", given=Literally("no classifier"), expected="a classifier of texts", fix=fix)
    return _Source(tier, run, found.head, found.architecture, found.metrics.measures if found.metrics else ())


def _one_task(sources: Sequence[_Source]) -> Task:
    names = sorted({source.architecture.task for source in sources})
    if len(names) > 1 or names[0] not in LABELS:
        fix = "Pairs of texts and regressions are not served as text yet; export runs of one task of these."
        raise UsageError("task of the runs", given=names, expected=f"one of {', '.join(LABELS)}", fix=fix)
    return TASKS[names[0]]


def _texts(pairs: Sequence[tuple[str, ...]]) -> Array:
    texts = np.empty((len(pairs), 1), np.object_)
    texts[:, 0] = [pair[0].encode() for pair in pairs]
    return texts


def _tiers(name: str, exported: Sequence[ExportedArtifact], golden: str) -> list[Tier]:
    """Return the tier, and its twin in INT8: a runtime takes one file of a tier, so precision is a choice of tier."""
    by_precision: dict[bool, list[Artifact]] = {False: [], True: []}
    for one in exported:
        by_precision[one.artifact.precision == "int8"].append(one.artifact)
    return [
        Tier(name=name, artifacts=tuple(by_precision[False]), golden=golden),
        Tier(name=f"{name}-int8", artifacts=tuple(by_precision[True]), golden=golden),
    ]


def _measures(source: _Source) -> list[Measure]:
    return [
        msgspec.structs.replace(measure, split=f"{measure.split}, tier {source.tier}") for measure in source.measures
    ]
