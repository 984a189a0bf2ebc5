"""Options of a fine-tuning; but for some epochs, :class:`export.finetune.recipe.FinetuningRecipe` has the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from edge.cli.options import FloatRange, grouped_options
from edge.cli.output import remark, working
from edge.errors import Raw, UsageError
from export.errors import listed
from export.finetune.recipe import Distillation, FinetuningRecipe

if TYPE_CHECKING:
    from export.training.runs import OwnData, SplitVersion


F = TypeVar("F", bound=Callable[..., Any])

_RECIPE, _DISTILLATION = FinetuningRecipe(), Distillation()


def epochs_option(default: int = _RECIPE.epochs) -> Callable[[F], F]:
    """Return ``--epochs``, with another default for a command that has a reason."""
    text = "All run; the best one is kept."
    return click.option("--epochs", type=click.IntRange(1), default=default, show_default=True, help=text)


batch_option = click.option(
    "--batch", type=click.IntRange(1), default=_RECIPE.batch_size, show_default=True, help="Examples per step."
)
rate_option = click.option(
    "--lr",
    type=FloatRange(0, min_open=True),
    default=_RECIPE.peak_learning_rate,
    show_default=True,
    help="Peak learning rate.",
)


average_option = click.option(
    "--average",
    type=FloatRange(0, 1, max_open=True),
    help="Keep a running average of the weights after the last epoch, not the best epoch: its decay, such as 0.999.",
)


transfer_option = click.option(
    "--transfer",
    type=click.Path(path_type=Path),
    metavar="TEXTS",
    help="With --teacher, for tasks of texts: a file with an unlabelled text in each line, to which the teacher's "
    "answers are learnt beside the labels; a task of pairs gets each text before a similar one.",
)


def _given(**weights: float | None) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight is not None}


#: Adds the weights of a distillation to a command, which gets the given ones, by name, as ``distillation``.
distillation_options = grouped_options(
    _given,
    "distillation",
    (
        click.option(
            "--imitation",
            type=FloatRange(0, 1),
            show_default=str(_DISTILLATION.imitation),
            help="With --teacher: weight of the teacher's outputs; the task's own loss has the rest of 1.",
        ),
        click.option(
            "--temperature",
            type=FloatRange(0, min_open=True),
            show_default=str(_DISTILLATION.temperature),
            help="With --teacher: divides the logits of both models before they are compared.",
        ),
        click.option(
            "--hidden",
            type=FloatRange(0),
            show_default=str(_DISTILLATION.hidden),
            help="With --teacher: weight of its hidden states, beside the rest of the loss. Each layer follows that of "
            "the teacher at the nearest depth, or that of its restoration. The widths must be equal; 0 leaves the "
            "states out.",
        ),
        click.option(
            "--transfer-share",
            type=FloatRange(0, 1, min_open=True, max_open=True),
            show_default=str(_DISTILLATION.transfer_share),
            help="With --transfer: its share of the rows of a batch, which has --batch others.",
        ),
    ),
)


def distillation_of(weights: Mapping[str, float], teacher: Path | None) -> Distillation:
    """Return the settings of a distillation; raise a UsageError for weights without a teacher."""
    if weights and teacher is None:
        name, weight = next(iter(weights.items()))
        option = f"--{name.replace('_', '-')}"
        fix = f"Give --teacher, or leave {option} out."
        raise UsageError(option, given=weight, expected="a run as --teacher beside it", fix=fix)
    return Distillation(**weights)


def check_final(final: bool, imported: bool) -> None:
    """Raise a UsageError for ``--final`` with a model that was imported: its data have no dev."""
    if final and imported:
        expected, fix = "data with labels, which have a dev", "Leave it out; the hold-out measures the agreement."
        raise UsageError("--final", given=Raw("the answers of an imported run"), expected=expected, fix=fix)


class OwnOptions(NamedTuple):
    """The options as given; see :class:`export.finetune.own_texts.ColumnChoices`."""

    data: Path | None
    dev: Path | None
    texts: tuple[str, ...]
    label: str | None
    labels: tuple[str, ...]
    regression: bool | None

    def check_none(self) -> None:
        """Raise a UsageError for an option that only own data have."""
        self._refuse("--data", "Give --data with a file or directory instead of TASK, or leave the option out.")

    def check_unlabelled(self) -> None:
        """Raise a UsageError for an option that texts or images without labels do not have."""
        expected = "nothing beside an imported run as --teacher, whose answers are the labels"
        self._refuse(expected, "Leave the option out; to train on labels of your own, leave --teacher out.")

    def _refuse(self, expected: str, fix: str) -> None:
        given = {"--dev": self.dev, "--text": self.texts, "--label": self.label, "--labels": self.labels}
        for option, value in given.items():
            if value:
                given_words = ", ".join(value) if isinstance(value, tuple) else str(value)
                raise UsageError(option, given=given_words, expected=expected, fix=fix)
        if self.regression is not None:
            option = "--regression" if self.regression else "--classification"
            raise UsageError(option, given=Raw("this option"), expected=expected, fix=fix)

    def describe(self, data: Path, split: SplitVersion) -> OwnData:
        """Read and check the data, with a bar, and say what was found; errors as :func:`.own_texts.describe`."""
        from export.finetune.own_texts import ColumnChoices, describe

        choices = ColumnChoices(self.texts, self.label, self.labels, self.regression)
        with working(f"reading {data}") as on_image:
            found = describe(data, self.dev, choices, on_image, split)
        for line in _remarks(found):
            remark(line)
        return found


_OPTIONS = (
    click.option(
        "--data",
        type=click.Path(path_type=Path),
        help="Instead of TASK, your own data: a table (.csv, .tsv, .jsonl, .parquet), a directory with train.csv and "
        "dev.csv, one that Hugging Face's datasets saved, or a folder of images as CLASS/NAME.png. A table with "
        "question, context and answer, or SQuAD's JSON, trains a model that finds answers. With an imported "
        "run as --teacher, texts or images without labels, as `fewheads import` takes them.",
    ),
    click.option(
        "--dev",
        type=click.Path(path_type=Path),
        help="Own data: what the published metrics are measured on.  [default: dev, validation or test in --data, or "
        "else a fifth of the rows]",
    ),
    click.option(
        "--text",
        "texts",
        multiple=True,
        metavar="COLUMN",
        help="Own data: column of the text; twice for pairs.  [default: by common names, such as text]",
    ),
    click.option(
        "--label", metavar="COLUMN", help="Own data: column of the label.  [default: by common names, such as label]"
    ),
    click.option(
        "--labels",
        metavar="NAME,NAME…",
        help="Own data: classes in the order of their numbers, or names for the classes 0, 1, ….  [default: those in "
        "the data, sorted]",
    ),
    click.option(
        "--regression/--classification",
        default=None,
        help="Own data: whether labels are numbers to predict.  [default: numbers that are not whole, or of more than "
        "20 kinds, are]",
    ),
)


def _options(
    data: Path | None,
    dev: Path | None,
    texts: Sequence[str],
    label: str | None,
    labels: str | None,
    regression: bool | None,
) -> OwnOptions:
    if len(texts) > 2:
        fix = "Join further columns into one."
        raise UsageError("--text", given=list(texts), expected="one column, or two for pairs", fix=fix)
    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    return OwnOptions(data, dev, tuple(texts), label, names, regression)


#: Adds the options of own data to a command, which gets all of them as the argument ``own``.
own_data_options = grouped_options(_options, "own", _OPTIONS)


def _classes(data: OwnData) -> str:
    return f"{len(data.labels)} classes ({listed(data.labels, 10)})"


def _remarks(data: OwnData) -> list[str]:
    """Return what was decided about the data, and what makes metrics on them doubtful."""
    from export.data.unlabelled import OTHER_ENDINGS

    name = data.name
    rows = ", ".join(f"{split.rows:,} {split.name}" for split in data.splits)
    if data.images:
        lines = [f"{name}: images of {_classes(data)}; {rows}"]
        folders = {Path(path) for path in (data.path, data.dev) if path}
        unread = sum(file.suffix.lower() in OTHER_ENDINGS for folder in folders for file in folder.rglob("*"))
        lines += [f"{name}: images that are neither JPEG nor PNG are left out: {unread:,}"] * bool(unread)
    elif data.spans:
        some = ", some of which have none" if data.no_answer else ""
        lines = [f"{name}: questions with answers in their contexts{some}; {rows}"]
    else:
        kind = _classes(data) if data.labels else "values"
        lines = [f"{name}: text in {' and '.join(data.texts)}, {kind} in {data.label}; {rows}"]
    lines += [f"{name}: {file.name} has no labels and is left out" for file in data.files if not file.split]
    return lines + [
        f"{name}: {split.in_train:,} of {split.rows:,} in {split.name} are in the training set, too; "
        "metrics on them say little about new data"
        for split in data.splits
        if split.in_train
    ]
