"""The comparison of mechanisms in the frame of experiments: training, use of heads, speed, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.images import ImageFolder, Images
from export.data.tokens import Encoded
from export.finetune.models import open_model
from export.finetune.objectives import TaskObjective
from export.finetune.predictions import Predicted, Predictions
from export.finetune.recipe import FinetuningRecipe
from export.finetune.run import predict_splits, prepare, save_run, task_of
from export.models.heads import Head, SequenceClassifier, SpanClassifier
from export.papers.adaptive.figures import draw
from export.papers.adaptive.measures import HeadUse, head_use, measure_files
from export.papers.adaptive.mechanisms import MECHANISMS, SharedInputs
from export.papers.adaptive.runs import name_of
from export.papers.adaptive.tables import MechanismRecord, order_of, tables_of
from export.papers.adaptive.term import AdaptiveObjective, adaptive_term
from export.papers.experiment import Experiment, Part, unfinished
from export.quantize.calibration import plain_onnx
from export.reduce.calibration import calibration_batches, check_original
from export.reduce.target import CALIBRATION_EXAMPLES
from export.report.table import Table
from export.training.device import DeviceName, device_of
from export.training.provenance import provenance
from export.training.runs import WEIGHTS
from export.training.trainer import Trained, train
from export.training.watch import Watch

SKIP = "skip"
#: Below ``--out``, of the runs that are kept.
RUNS = "runs"
_LONG_TOKENS = 128

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MechanismSettings(msgspec.Struct, frozen=True):
    """Settings that all mechanisms of a comparison share; ``run`` is the SHA-256 of the dense run's weights."""

    run: str
    recipe: FinetuningRecipe
    limit: int | None
    seeds: int


class Mechanisms(Experiment[MechanismRecord]):
    """The comparison of mechanisms, each with each seed.

    Args:
        names: of mechanisms.
        out: keeps the states of unfinished trainings, too.
        keep_runs: whether each model is also kept as a run in ``out`` when its training ends.

    Raises:
        UsageError: the run has another architecture or task.
        ReductionError: the model cannot be reduced, or there are too few examples for calibration.
    """

    title, extensible, record = "Ways to save attention", ("seeds",), MechanismRecord

    def __init__(
        self,
        run: Path,
        data_dir: Path,
        out: Path,
        names: Sequence[str],
        recipe: FinetuningRecipe,
        *,
        limit: int | None,
        seeds: int,
        device: DeviceName,
        keep_runs: bool = False,
    ) -> None:
        self._names, self._out, self._device, self._keep_runs = names, out, device, keep_runs
        opened = open_model(run)
        task, model, architecture = task_of(opened, run), opened.head, opened.architecture
        assert architecture is not None
        kind = architecture.transformer.architecture
        if not isinstance(model, SequenceClassifier | SpanClassifier) or kind not in ("bert", "vit"):
            given = Raw(f"a run on {task.name} with a {kind}")
            expected = "a BERT or ViT with one answer for a text or an image"
            fix = "Give a run on a task of GLUE, on SQuAD or on images."
            raise UsageError(f"{run}", given=given, expected=expected, fix=fix)
        self.settings: MechanismSettings = MechanismSettings(sha256((run / WEIGHTS).read_bytes()), recipe, limit, seeds)
        data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
        self._dense, self._task, self._data, self._run, self._data_dir = model, task, data, run, data_dir
        self._architecture = architecture
        self._dev = next(iter(data.dev.values()))
        self._lengths: tuple[int, ...] = ()  # of images there is one size
        self._calibration: Encoded | Images | ImageFolder
        if isinstance(data.train, Encoded):
            self._calibration = data.train.first(CALIBRATION_EXAMPLES)
            # The median of dev, because SST-2's hold-out is phrases like its training set.
            longest = min(_LONG_TOKENS, model.transformer.config.max_positions)
            self._lengths = int(np.median(self._dev.lengths)), longest
        else:
            images = cast(Images | ImageFolder, data.train)
            self._calibration = images.take(np.arange(len(images.targets))[:CALIBRATION_EXAMPLES])
        if any(MECHANISMS[name].calibrated for name in names):
            check_original(model)
            calibration_batches(model, self._calibration)

    @cached_property
    def _dense_file(self) -> bytes:
        return plain_onnx(self._dense, self._dev)

    def parts(self) -> list[Part]:
        """Return a part for each mechanism and seed."""
        return [Part(f"{name}-seed{seed}", (name, seed)) for seed in range(self.settings.seeds) for name in self._names]

    def compute(self, part: Part, watch: Watch) -> MechanismRecord:
        """Make, train and time a mechanism; an unfinished training resumes."""
        name, seed = part.arguments
        mechanism, task, data, recipe = MECHANISMS[name], self._task, self._data, self.settings.recipe
        # The last epoch, not the best: a budget falls during the training, and early epochs leave out less.
        recipe = replace(recipe, epochs=mechanism.passes * recipe.epochs, min_delta=-math.inf)
        directory = unfinished(self._out, part)
        shared = SharedInputs(self._dense, self._calibration, seed, directory / "reduction")
        made = mechanism.make(shared)
        model, loss = made.model.to(device_of(self._device)), mechanism.train(shared)

        def score() -> float:
            return float(task.predict(model, data.holdout).score(task.headline))

        with adaptive_term(model, loss) if loss else nullcontext() as term:
            of = partial(AdaptiveObjective, term=term) if term else TaskObjective
            objective = of(model, data.train, recipe, seed=seed, evaluate=score)
            tuned = train(objective, recipe, seed=seed, state=directory / "state", observer=watch)
        predicted = task.predict(model, self._dev)
        model = model.cpu()
        use = head_use(model, self._dev) or HeadUse(made.kept)
        if self._keep_runs:
            self._keep(part, model, recipe, tuned, predicted)
        small = mechanism.shrink(model) if mechanism.shrink else model
        lengths = self._lengths if name != SKIP else ()  # what is skipped for random tokens says nothing
        files = measure_files(self._dense, self._dense_file, small, self._dev, self._calibration, lengths)
        metric, answers, targets = _answers(predicted, task.headline)
        return MechanismRecord(
            name=name,
            what=mechanism.what,
            seed=seed,
            metric=metric,
            smaller=mechanism.shrink is not None,
            holdout=tuned.scores,
            use=use,
            speeds=files.speeds,
            peak_bytes=files.peak_bytes,
            int8=files.int8,
            answers=tuple(answers.tolist()),
            targets=tuple(targets.tolist()),
        )

    def _keep(self, part: Part, model: Head, recipe: FinetuningRecipe, tuned: Trained, predicted: Predicted) -> None:
        (name, seed), task = part.arguments, self._task
        number = len(self._data.train.targets)
        what = f"mechanism {name} from {self._run.name}, {number} examples, {recipe}"
        save_run(
            task,
            self._out / RUNS / part.name,
            model,
            replace(self._architecture, transformer=model.transformer.config),
            task.reader(self._run),
            {**predict_splits(task, model, self._data, final=False), next(iter(self._data.dev)): predicted},
            record=provenance(trainer=what, data=task.origin, seed=seed),
            tuned=tuned,
            data_dir=self._data_dir,
            precision=recipe.precision,
            trained_on=number,
            name=name_of(name),
        )

    def tables(self, records: Mapping[str, MechanismRecord]) -> list[Table]:
        """Return the tables of all mechanisms and of their files, and that of their order."""
        return [*tables_of(records), *order_of(records)]

    def figures(self, records: Mapping[str, MechanismRecord]) -> Mapping[str, Figure]:
        """Return the picture of the scores of the first seed."""
        figure = draw({record.name: record.use for record in records.values() if record.seed == 0})
        return {"scores": figure} if figure else {}


def _answers(predicted: Predicted, headline: str) -> tuple[str, Array, Array]:
    """Return metric, answers and targets of a :class:`MechanismRecord`."""
    if isinstance(predicted, Predictions):
        return headline, predicted.answers, predicted.targets
    items = predicted.of_items(headline)
    return f"mean of {headline}", items, np.zeros_like(items)
