"""Export of imported runs and those reduced from them to one bundle: a tier for each, and its INT8 twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from torch import Tensor, nn

from edge.bundles.bundle import write_bundle
from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import (
    ImagePreprocess,
    LabelPostprocess,
    Manifest,
    Measure,
    Postprocess,
    Profile,
    ScorePostprocess,
    Tier,
    TokenizerPreprocess,
    TokenLabelPostprocess,
)
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.datatypes import Array, TensorSpec, datatype_of
from export.convert import golden_of
from export.exported import RUNTIMES, Exported
from export.heads import SequenceClassifier, TokenClassifier
from export.imported.accuracy import BY_TOKEN, int8_measures
from export.imported.images import sample_images
from export.provenance import provenance
from export.quantization.ranges import Feeds
from export.runs import TOKENIZER
from export.runtimes import export_tier, files_of
from export.tasks.bundle import chosen_artifacts, tiers_of
from export.tasks.bundle_inputs import (
    BATCH_NAMES,
    GOLDEN_ROWS,
    IDS,
    MASK,
    MAX_BATCH_SIZE,
    PAD_ID,
    SEGMENTS,
    TEXTS,
    USUAL_TOKENS,
    columns,
)
from export.tasks.calibration import CALIBRATION_ROWS
from export.tasks.examples import Examples, limited, split_holdout
from export.tasks.file_accuracy import OnRows, in_tier
from export.tasks.image_files import read_image, read_pixels
from export.tasks.imported import MOST_HELD_OUT, ImportedTask, check_alike
from export.tasks.models import SCORE, open_model
from export.tasks.objectives import Head
from export.tasks.texts import MAX_TEXT_BYTES, sample_texts
from export.tasks.tokens import Rows, load_tokenizer

#: The same tensor, which the graph reads and returns.
_OFFSETS_READ, _OFFSETS = "token_offsets", "offsets"
#: Images are large: golden ones, those of a calibration, and rows of a run.
_GOLDEN_IMAGES, _CALIBRATION_IMAGES, _MAX_IMAGES = 8, 64, 8


class _Inputs(NamedTuple):
    """Preprocess step, what a client sends and what the graph reads in the golden set, and other rows one by one."""

    step: TokenizerPreprocess | ImagePreprocess
    raw: dict[str, Array]
    golden: dict[str, Array]
    calibration: Sequence[Feeds]
    files: dict[str, bytes]


class _WithOffsets(nn.Module):
    """A model that also returns the characters of its tokens, which it reads last."""

    def __init__(self, model: Head) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, mask: Tensor, third: Tensor, fourth: Tensor | None = None) -> tuple[Tensor, ...]:
        segments, offsets = (None, third) if fourth is None else (third, fourth)
        outputs = self.model(inputs, mask, segments)
        return (*((outputs,) if isinstance(outputs, Tensor) else outputs), offsets.clone())


def export_imported(
    runs: Sequence[Path],
    repository: str | Path,
    name: str,
    data: Path | None,
    *,
    tiers: Sequence[str],
    version: int = 1,
    artifacts: Sequence[str] = RUNTIMES,
    replace: bool = False,
    on_rows: OnRows | None = None,
) -> Exported:
    """Write imported and reduced runs as the tiers of one bundle, ``repository/<name>-<version>``.

    Args:
        runs: the original first.
        data: texts or images for the golden set, the ranges of INT8 and its agreement; None takes some of ours, and
            measures nothing.
        tiers, artifacts: see :func:`export.tasks.bundle.export_classifier`.
        on_rows: called while the files in INT8 are compared with the first run on the hold-out; None compares none.

    Raises:
        UsageError: the runs are not of one imported model.
        DataError: ``data`` cannot be read.
    """
    opened = [open_model(run) for run in runs]
    head, description = opened[0].head, opened[0].architecture
    assert head is not None
    assert description is not None
    for run, one in zip(runs, opened, strict=True):
        fix = "Give an imported run first, and runs that were reduced from it."
        check_alike(f"run {run}", one, description, runs[0], fix)
    task = ImportedTask(description, head)
    inputs = _images(task, data) if description.image else _texts(task, runs[0], data)
    by_token = isinstance(head, BY_TOKEN)
    rows = _holdout(task, runs[0], data) if data and on_rows else None
    outputs = [*head.outputs, *([_OFFSETS] if by_token else [])]
    files, made, measures, largest = dict(inputs.files), list[Tier](), list[Measure](), 0.0
    for tier, one in zip(tiers, opened, strict=True):
        assert one.head is not None
        model = _WithOffsets(one.head) if by_token else one.head
        exported = chosen_artifacts(
            export_tier(model, inputs.golden, inputs.calibration, outputs, name=tier, dynamic=_dynamic(inputs.golden)),
            artifacts,
            tier,
        )
        golden = golden_of(model, inputs.golden, outputs)
        golden_file = f"{tier}.golden.npz"
        files[golden_file] = msgspec.structs.replace(golden, raw=inputs.raw).encode()
        files |= files_of(exported)
        made += tiers_of(tier, exported, golden_file)
        measures += in_tier(one.metrics.measures if one.metrics else (), tier)
        if rows is not None and on_rows is not None:
            measures += int8_measures(task, tier, exported, rows, names=_names(inputs), on_rows=on_rows)
        largest = max(largest, *(each.largest_difference for each in exported))
    manifest = Manifest(
        name=name,
        version=version,
        description=_described(task),
        inputs=_specs(inputs.golden, by_token=description.image is None),
        outputs=_specs(golden.outputs, by_token),
        max_batch_size=_MAX_IMAGES if description.image else MAX_BATCH_SIZE,
        profile=_profiles(task, inputs.golden),
        tiers=tuple(made),
        golden=f"{tiers[0]}.golden.npz",
        files={},
        provenance=provenance(trainer=", ".join(run.name for run in runs), data=task.origin, seed=None),
        preprocess=inputs.step,
        postprocess=_postprocess(task),
        measures=tuple(measures),
    )
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported(
        str(written.path), largest, sum(len(content) for file, content in files.items() if file.endswith(".onnx"))
    )


def _holdout(task: ImportedTask, run: Path, data: Path) -> Rows:
    items = limited(split_holdout(task.items(data))[1], MOST_HELD_OUT)
    return task.answered(items, data, task.reader(run), task.description.max_length)


def _names(inputs: _Inputs) -> dict[str, str]:
    """Return the names of the graph's inputs in a batch."""
    return {**BATCH_NAMES, _OFFSETS_READ: "offsets", inputs.step.outputs[0]: "inputs"}


def _texts(task: ImportedTask, run: Path, data: Path | None) -> _Inputs:
    description = task.description
    names = ("question", "context") if description.task == "question-answering" else TEXTS
    config = TokenizerPreprocess(
        input=names[0],
        file=TOKENIZER,
        ids=IDS,
        mask=MASK,
        max_length=description.max_length,
        pad_id=PAD_ID,
        max_text_bytes=MAX_TEXT_BYTES,
        pair=names[1] if description.pair else None,
        # Without a second segment, the first one is a constant of the graph.
        segments=SEGMENTS if description.pair and description.transformer.segments > 1 else None,
        offsets=_OFFSETS_READ if isinstance(task.original, BY_TOKEN) else None,
    )
    definition = load_tokenizer(run).to_str().encode()
    tokenize = TokenizerPreprocessor(config, definition, str(run / TOKENIZER))
    if data is None:
        texts = sample_texts(description.pair)
        items = Examples(texts, np.zeros(len(texts), np.int64))
    else:
        items = task.items(data)
    first, others = _split(items, GOLDEN_ROWS, CALIBRATION_ROWS)
    golden, calibration = columns(first), [tokenize(*columns([row])) for row in others]
    raw = {name: column.astype(np.bytes_) for name, column in zip(names, golden, strict=False)}
    return _Inputs(config, raw, tokenize(*golden), calibration, {TOKENIZER: definition})


def _split(items: Examples, golden: int, calibration: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return items for the golden set, of the hold-out where it has enough, and others for calibration."""
    train, holdout = split_holdout(items)
    first = limited(holdout if len(holdout.texts) >= golden else items, golden)
    # All items are held out together where they have the same first text.
    return first.texts, limited(train if train.texts else items, calibration).texts


def _images(task: ImportedTask, data: Path | None) -> _Inputs:
    step = task.description.image
    assert step is not None
    reader = ImagePreprocessor(step)
    if data is None:
        files = sample_images(step)
        golden = calibration = [reader.read(file, "image") for file in files]
    else:
        first, others = _split(task.items(data), _GOLDEN_IMAGES, _CALIBRATION_IMAGES)
        files = [read_image(data / name) for (name,) in first]
        golden, calibration = ([read_pixels(data / name, reader) for (name,) in part] for part in (first, others))
    raw: Array = np.array([[file] for file in files], np.object_)
    feeds = [{step.output: pixels[None]} for pixels in calibration]
    return _Inputs(step, {step.input: raw.astype(np.bytes_)}, {step.output: np.stack(golden)}, feeds, {})


def _dynamic(inputs: dict[str, Array]) -> dict[str, dict[int, str]]:
    """Return the dynamic dimensions: the rows, and except of images the tokens."""
    return {name: {0: "batch"} if array.ndim == 4 else {0: "batch", 1: "length"} for name, array in inputs.items()}


def _specs(tensors: Mapping[str, Array], by_token: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of golden tensors, whose rows are dynamic, and with ``by_token`` their second dimension, too."""
    dynamic = (-1, -1) if by_token else (-1,)
    return tuple(
        TensorSpec(name, datatype_of(array), (*dynamic, *array.shape[len(dynamic) :]))
        for name, array in tensors.items()
    )


def _profiles(task: ImportedTask, inputs: dict[str, Array]) -> dict[str, Profile]:
    description = task.description
    usual, most = min(USUAL_TOKENS * (1 + description.pair), description.max_length), description.max_length
    found = {}
    for name, array in inputs.items():
        rest = array.shape[1:] if description.image else array.shape[2:]
        shapes = ((1,), (1,), (_MAX_IMAGES,)) if description.image else ((1, 1), (1, usual), (MAX_BATCH_SIZE, most))
        least, tuned, largest = ((*shape, *rest) for shape in shapes)
        found[name] = Profile(min=least, opt=tuned, max=largest)
    return found


def _postprocess(task: ImportedTask) -> Postprocess | None:
    model, labels = task.original, task.description.labels
    if isinstance(model, TokenClassifier):
        return TokenLabelPostprocess(logits="logits", output="labels", labels=labels)
    if not isinstance(model, SequenceClassifier):
        return None
    if model.regression:
        return ScorePostprocess(logits="logits", output=SCORE)
    return LabelPostprocess(logits="logits", output="label", labels=labels)


def _described(task: ImportedTask) -> str:
    labels = task.description.labels
    what = task.name.replace("-", " ")
    return f"{what}: {', '.join(labels[:8])}{' …' if len(labels) > 8 else ''}" if labels else what
