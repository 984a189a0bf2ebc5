"""The report: the verdict, the path from the accuracy in training to that in use, all switches and all conditions."""

from __future__ import annotations

from export.papers.backward.mismatch.results import Results
from export.papers.backward.mismatch.summary import METRICS
from export.papers.experiment import markdown_table
from export.training.intervals import RESAMPLES, Mean, points, with_interval

_HEADS = (
    "base in training",
    "base in use",
    "begin tokens",
    "data",
    "items",
    "tokens right, teacher-forced",
    "completions right, teacher-forced",
    "completions right, written",
    "answers right, written",
)
_BASES = {"fp32": "FP32", "nf4": "NF4"}


def report_of(results: Results, figure: str | None) -> str:
    """Return the report.

    Args:
        figure: file name beside the report.
    """
    settings = results.settings
    seeds = max((row.seeds for row in results.rows), default=0)
    lines = [
        "# Accuracy in training and in use of a fine-tuned language model",
        "",
        results.verdict,
        "",
        f"Written by `fewheads language mismatch`, on {results.base.name} with SHA-256 {results.base.sha256[:12]}…, by "
        f"LoRA of rank {settings.rank} on all linear layers but the last, {settings.epochs} epochs at "
        f"{settings.rate:g}, {seeds} seeds. The base is in FP32 or rounded to NF4 while an adapter trains, and the "
        "adapter is used on that base or merged into the FP32 base. Texts begin with the tokens "
        f"{list(settings.begin)}, once in training. The second time, these move all other tokens by so many places; "
        "with places kept, the others stay where they were in training, and the first tokens share their place. "
        "Teacher-forced scores are the most likely tokens given the right ones before them; written scores are of "
        f"greedy decoding from the question alone. Intervals are of 95 %: they add the errors of the examples "
        f"({RESAMPLES:,} resamples) and of the seeds (Student's); differences are of the same "
        "adapters and, within a split, the same examples.",
        "",
        f"Computed on {results.processor.name} ({results.processor.described}).",
    ]
    if results.missing:
        lines += ["", f"{results.missing} parts are still to be computed."]
    steps = [
        (step.name, step.split, _percent(step.accuracy), points(step.change) if step.change else "")
        for step in results.path
    ]
    lines += ["", "## From training to use, adapters of the NF4 base", ""]
    lines += markdown_table(("step", "data", "accuracy in %", "change in points"), steps, texts=2)
    if figure:
        lines += ["", f"![{figure.removesuffix('.png')}]({figure})"]
    splits = list(results.effects[0].changes) if results.effects else []
    effects = [
        (_BASES[effect.base], effect.switch, *(points(effect.changes[split]) for split in splits))
        for effect in results.effects
    ]
    lines += ["", "## One switch at a time, change in points", ""]
    lines += markdown_table(("base in training", "switch", *splits), effects, texts=2)
    rows = [
        (
            _BASES[row.base],
            "FP32, merged" if row.merged else f"{_BASES[row.base]}, its own",
            row.begin,
            row.split,
            f"{row.items:,}",
            *(_percent(row.values[metric]) for metric in METRICS),
        )
        for row in results.rows
    ]
    lines += ["", "## All conditions, accuracy in %", "", *markdown_table(_HEADS, rows, texts=4)]
    return "\n".join(lines) + "\n"


def _percent(value: Mean) -> str:
    return with_interval(value.value, value.interval, lambda share: f"{100 * share:.1f}")
