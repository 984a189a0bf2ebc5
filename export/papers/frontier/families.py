"""Families of smaller encoders, restored on plain text: the tables of FAMILIES.md and of the README's first screen.

``families/MODEL/`` has, of each training of several tiers, a directory with the records of ``fewheads evaluate`` of the
original and its tiers, and of ``fewheads export``, ``estimate`` and ``int8``.
``python -m export.papers.frontier.families`` writes the tables anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge.bundles.manifest import Manifest, MeasuredLatency, Tier
from export.report.embeddings.records import COSINE, RunRecord, Score, read_records, tables
from export.report.int8 import DYNAMIC, METHODS, Int8Comparison
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import with_interval

_HERE = Path(__file__).parent
PAGE, README = _HERE / "FAMILIES.md", _HERE.parents[2] / "README.md"
_COMMAND = "python -m export.papers.frontier.families"
_RECORDS = "export/papers/frontier/families"
#: Power modes of the estimates.
_MODES = ("15W", "MAXN_SUPER")
#: End of the names of tiers in INT8.
_INT8 = "-int8"
_MEAN, _SICK, _QUESTIONS = "mean of STS13, STS14, STS15, STS-B dev", "SICK test", "QNLI dev"


def pages() -> dict[Path, str]:
    """Return FAMILIES.md and README.md with the tables of the records."""
    found, summary = dict[str, Table](), list[Sequence[object]]()
    for directory in sorted(path for path in (_HERE / "families").iterdir() if path.is_dir()):
        trainings = sorted(path for path in directory.iterdir() if path.is_dir())
        manifests = [msgspec.json.decode((one / "manifest.json").read_bytes(), type=Manifest) for one in trainings]
        records, speeds = list[RunRecord](), dict[str, tuple[str, str]]()
        for training, manifest in zip(trainings, manifests, strict=True):
            evaluated = read_records(training)
            records += [record for record in evaluated if record.run not in speeds]  # the original once
            speeds = _speeds(manifest.tiers, evaluated) | speeds
        records.sort(key=lambda record: -record.speed.predicted[0].milliseconds)
        order = _by_speed(manifests).index
        of_model = {
            "orin": _predicted(trainings, order),
            "x86": _measured(manifests, order),
            "int8": _int8(directory),
            **{table.title.partition(" ")[0].lower(): table for table in tables(records)},
        }
        found |= {f"{_RECORDS}/{directory.name}#{name}": table for name, table in of_model.items()}
        summary += _summary(records, speeds)
    heads = (
        *("model", "on a Jetson, FP16, predicted", "on x86, FP32, INT8", "similarity", "SICK"),
        *("retrieval from the original's index", "cosine"),
    )
    first_screen = with_tables(README.read_text(), _COMMAND, {_RECORDS: Table("", heads, summary)})
    return {PAGE: with_tables(PAGE.read_text(), _COMMAND, found), README: first_screen}


def _summary(records: Sequence[RunRecord], speeds: Mapping[str, Sequence[str]]) -> Iterator[Sequence[object]]:
    """Yield a row of the README for each run: scores of the original, and differences of the others."""
    for record in records:
        is_original = record is records[0]
        scores = {(one.group, one.items, one.measure, one.queries, one.index): one for one in record.scores}
        shown = (
            scores["sts", _MEAN, "Spearman", "run", "run"],
            scores["sts", _SICK, "Spearman", "run", "run"],
            scores["retrieval", _QUESTIONS, "MRR@10", "run", "run"]
            if is_original
            else scores["mixed", _QUESTIONS, "MRR@10", "run", "original"],
        )
        cosine = [f"{one.value.value:.3f}" for one in record.scores if one.measure == COSINE]
        yield (record.run, *speeds[record.run], *map(_cell, shown), *(cosine[:1] if not is_original else [""]))


def _cell(score: Score) -> str:
    found = score.difference
    if found is None:
        return f"{score.value.value:.1f}"
    return with_interval(found.value, found.interval, lambda number: f"{number:+.1f}")


def _speeds(tiers: Sequence[Tier], records: Sequence[RunRecord]) -> dict[str, tuple[str, str]]:
    """Return the speeds of each run: predicted in FP16 for 32 and 128 tokens, and measured in FP32 and INT8 for 32."""
    faster = {
        (tier.name, isinstance(one, MeasuredLatency), one.tokens): f"{one.times_faster:.1f}×"
        for tier in tiers
        for one in tier.latencies
        if one.rows == 1
    }
    names = [tier.name for tier in tiers if not tier.name.endswith(_INT8)]
    return {
        record.run: (
            ", ".join(faster[name, False, tokens] for tokens in (32, 128)),
            ", ".join(faster[each, True, 32] for each in (name, name + _INT8)),
        )
        for record, name in zip(records, names, strict=True)
    }


def _by_speed(manifests: Sequence[Manifest]) -> list[str]:
    """Return the names of all tiers by the board's speed in FP16, those in INT8 behind their twins."""
    speeds = {
        tier.name: one.times_faster
        for manifest in manifests
        for tier in manifest.tiers
        for one in tier.latencies
        if (one.rows, one.tokens) == (1, 32) and not isinstance(one, MeasuredLatency)
    }
    return sorted(speeds, key=lambda name: (speeds[name.removesuffix(_INT8)], name))


def _measured(manifests: Sequence[Manifest], order: Callable[[str], int]) -> Table:
    """Return the latencies that were measured here, those of a manifest in turns, and the sizes of the files.

    Sizes of which the tiers take too long together have no latency in a manifest.
    """
    rows = dict[str, Sequence[object]]()
    for manifest, tier in ((one, tier) for one in manifests for tier in one.tiers):
        sizes = {file.runtime: f"{manifest.files[file.file].size_bytes / 1e6:.1f}" for file in tier.artifacts}
        measured = [one for one in tier.latencies if isinstance(one, MeasuredLatency) and one.rows == 1]
        cells = {one.tokens: (f"{one.milliseconds:.2f}", f"{one.times_faster:.2f}×") for one in measured}
        times = [cell for tokens in (32, 128) for cell in cells.get(tokens, (None, None))]
        row = (tier.name, measured[0].precision, *times, sizes["onnxruntime"], sizes["tensorrt"])
        rows.setdefault(tier.name, row)  # the original of the first training
    heads = ("tier", "precision", "32 tokens, ms", "times faster", "128 tokens, ms", "times faster")
    return Table(
        "",
        (*heads, "file for ONNX Runtime, MB", "for TensorRT, MB"),
        [rows[name] for name in sorted(rows, key=order)],
        2,
    )


def _predicted(trainings: Sequence[Path], order: Callable[[str], int]) -> Table:
    """Return the predicted latencies of all tiers, for both precisions and power modes."""
    rows: dict[tuple[str, str, int], list[Any]] = {}
    for training in trainings:
        found: dict[tuple[str, str, int], list[Any]] = {}
        for mode in _MODES:
            for row in msgspec.json.decode((training / f"estimate-{mode}.json").read_bytes())["rows"]:
                cells = found.setdefault((row["tier"], row["precision"], row["tokens"]), [])
                band = row["prediction"]
                cells += [
                    f"{row['milliseconds']:.2f} ({band['low_ms']:.2f} … {band['high_ms']:.2f})",
                    f"{row['times_faster']:.2f}×",
                ]
        rows = found | rows  # the original of the first training
    heads = ("tier", "precision", "tokens", *(head for mode in _MODES for head in (f"{mode}, ms", "times faster")))
    listed = sorted(rows, key=lambda key: order(key[0]))
    return Table("", heads, [(*key, *rows[key]) for key in listed], 2)


def _int8(directory: Path) -> Table:
    """Return what INT8 changes on STS-B's dev, of the files for ONNX Runtime and of those for TensorRT."""
    rows = []
    for path in sorted(directory.glob("*/int8-*.json"), key=lambda path: path.name):
        record = msgspec.json.decode(path.read_bytes(), type=Int8Comparison)
        scored = {one.method: one for one in record.scored}
        for name, method in (("dynamic, ONNX Runtime", DYNAMIC), ("static, as for TensorRT", METHODS[-1])):
            found = scored[method].difference
            change = with_interval(found.value, found.interval, lambda number: f"{100 * number:+.2f}")
            rows.append((record.run, name, record.n, change))
    return Table("", ("run", "INT8", "pairs", "Spearman x 100, difference to FP32"), rows, 2)


if __name__ == "__main__":
    write_pages(pages())
