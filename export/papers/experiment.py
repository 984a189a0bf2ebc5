"""The frame of all experiments: settings that are checked, parts that resume, and tables and figures of the records.

A directory has ``settings.json``, ``records.jsonl`` with a line for each finished part, ``report.md`` and figures.
"""

from __future__ import annotations

import lzma
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from edge.cli.output import print_json, remark
from edge.errors import Raw, UsageError
from edge.files import sha256, write_whole
from export.errors import CheckpointError
from export.report.drawing import new_figure, write_figure
from export.report.table import Table
from export.training.jobs import Outcome, ProcessJob, run_jobs
from export.training.watch import Watch, watching, watching_each

if TYPE_CHECKING:
    from matplotlib.figure import Figure

R = TypeVar("R", bound=msgspec.Struct)
S = TypeVar("S", bound=msgspec.Struct)
SETTINGS, RECORDS, REPORT, LOGS, UNFINISHED = "settings.json", "records.jsonl", "report.md", "logs", "unfinished"


class Part(NamedTuple):
    """What is computed once and alone; its name is unique and a file name without a suffix."""

    name: str
    arguments: tuple[Any, ...] = ()


class Experiment(ABC, Generic[R]):
    """An experiment, which :func:`run_experiment` runs; it is pickled for jobs side by side.

    Attributes:
        title: of the report.
        settings: all that the records depend on.
        extensible: names of settings, or how they begin, that may differ from those on disk, such as ``seeds``: they
            decide which parts there are, not what one of them gives.
        record: the type of a part's record.
    """

    title: str
    settings: msgspec.Struct
    extensible: tuple[str, ...] = ()
    record: type[R]

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return all parts, in the order of their computation."""

    @abstractmethod
    def compute(self, part: Part, watch: Watch) -> R:
        """Return the record of a part."""

    @abstractmethod
    def tables(self, records: Mapping[str, R]) -> Sequence[Table]:
        """Return the tables of the records by part, in the order of :meth:`parts`; some may be missing."""

    def text(self, records: Mapping[str, R]) -> str:
        """Return what the report says before its tables, in Markdown."""
        return ""

    def figures(self, records: Mapping[str, R]) -> Mapping[str, Figure]:
        """Return figures by file name without a suffix."""
        return {}


def run_experiment(experiment: Experiment[R], out: Path, *, plots: bool = True, as_json: bool = False) -> dict[str, R]:
    """Compute the parts here, one by one, then report as :func:`report_experiment`; return all records."""
    if plots:
        new_figure(1, 1, without="give --no-plots")
    compute_parts(experiment, out)
    return report_experiment(experiment, out, plots=plots, as_json=as_json)


def compute_parts(
    experiment: Experiment[R],
    out: Path,
    *,
    as_jobs: bool = False,
    jobs: int | None = None,
    ray: str | None = None,
    gpu: bool = False,
) -> None:
    """Compute the parts that have no record yet.

    Args:
        as_jobs: whether each part has a process of its own, with one thread or one GPU; else all are computed here.
        jobs, ray, gpu: of jobs, see :func:`export.training.jobs.run_jobs`.

    Raises:
        UsageError: ``out`` has records of other settings, or cannot be written.
        JobError: some parts failed; the others are recorded.
    """
    keep_settings(out, experiment.settings, extensible=experiment.extensible)
    parts = experiment.parts()
    records = read_records(out, experiment.record)
    missing = [part for part in parts if part.name not in records]
    if len(missing) < len(parts):
        remark(f"{len(parts) - len(missing)} of {len(parts)} parts were computed earlier")

    calls = [ProcessJob(part.name, _compute, (experiment, part)) for part in missing]

    def keep(outcome: Outcome) -> None:
        if not outcome.error:
            _append(out / RECORDS, _Line(outcome.job.name, outcome.seconds, outcome.result))
            shutil.rmtree(out / UNFINISHED / outcome.job.name, ignore_errors=True)

    if not as_jobs:
        with watching_each("computing") as begin:
            for number, (part, job) in enumerate(zip(missing, calls, strict=True), len(parts) - len(missing) + 1):
                remark(f"{number} of {len(parts)}: {part.name}")
                watch, started = begin(part.name), time.perf_counter()
                record = experiment.compute(part, watch)
                keep(Outcome(job, time.perf_counter() - started, record))
    else:
        run_jobs(calls, logs=out / LOGS, workers=jobs, ray=ray, gpu=gpu, on_outcome=keep)


def report_experiment(
    experiment: Experiment[R], out: Path, *, plots: bool = True, as_json: bool = False
) -> dict[str, R]:
    """Write report.md and figures from ``records.jsonl`` alone, and print the tables; return the records."""
    report = report_on(experiment, out, plots=plots)
    for name, figure in report.figures.items():
        write_figure(figure, out / f"{name}.png")
    write_whole(out / REPORT, report.page.encode())
    if as_json:
        tables = [{"title": one.title, "heads": one.heads, "rows": one.rows} for one in report.tables]
        printed = {"settings": experiment.settings, "missing": report.missing, "text": report.text, "tables": tables}
        print_json(printed)
    else:
        for table in report.tables:
            table.print()
        remark(f"written: {out / REPORT}")
    return report.records


class ExperimentReport(msgspec.Struct, Generic[R], frozen=True):
    """A report in Markdown, and what it is made of; ``missing`` parts have no record yet."""

    page: str
    records: dict[str, R]
    missing: int
    text: str
    tables: Sequence[Table]
    figures: Mapping[str, Figure]


def report_on(experiment: Experiment[R], out: Path, *, plots: bool = True) -> ExperimentReport[R]:
    """Return the report on the records of a directory, where nothing is written."""
    recorded, names = read_records(out, experiment.record), [part.name for part in experiment.parts()]
    records = {name: recorded[name] for name in names if name in recorded}
    text, tables, missing = experiment.text(records), experiment.tables(records), len(names) - len(records)
    figures = experiment.figures(records) if plots else {}
    lines = [f"# {experiment.title}"]
    lines += ["", text] if text else []
    lines += ["", f"{missing} of {len(names)} parts are still to be computed."] if missing else []
    for table in tables:
        lines += ["", f"## {table.title}", "", *table.markdown()]
    for name in figures:
        lines += ["", f"![{name}]({name}.png)"]
    return ExperimentReport("\n".join([*lines, ""]), records, missing, text, tables, figures)


def unfinished(out: Path, part: Part) -> Path:
    """Return a directory for what a part resumes from, such as the state of a training; its record removes that."""
    path = out / UNFINISHED / part.name
    path.mkdir(parents=True, exist_ok=True)
    return path


def read_records(out: Path, kind: type[R]) -> dict[str, R]:
    """Return the records of a directory by part; an unfinished last line, of a run that was killed, is left out.

    Published records may be compressed, as ``records.jsonl.xz``.

    Raises:
        CheckpointError: a line is malformed.
    """
    decoder = msgspec.json.Decoder(_Line[kind])  # type: ignore[valid-type]
    records = {}
    for path, read in ((out / f"{RECORDS}.xz", lzma.decompress), (out / RECORDS, bytes)):
        lines = read(path.read_bytes()).split(b"\n")[:-1] if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                found = decoder.decode(line)
            except msgspec.DecodeError as error:
                fix = "Delete the line, and give the same command: it computes the part again."
                subject = f"{path}, line {number}"
                raise CheckpointError(subject, given=Raw(error), expected="a record", fix=fix) from None
            records[found.part] = found.record
    return records


def read_settings(out: Path, kind: type[S]) -> S:
    """Return the settings of an experiment that ran in a directory; a UsageError says that there are none."""
    try:
        return msgspec.json.decode((out / SETTINGS).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise _malformed(out, error, "Give the --out of an earlier run.") from None


def keep_settings(out: Path, settings: msgspec.Struct, *, extensible: tuple[str, ...] = ()) -> None:
    """Write settings into a directory without any, or check those there.

    Raises:
        UsageError: it has other or unknown settings, or records without any, or cannot be written.
    """
    data, path = msgspec.json.format(msgspec.json.encode(settings), indent=2), out / SETTINGS
    try:
        if path.exists():
            _check_same(out, msgspec.json.decode(path.read_bytes()), msgspec.json.decode(data), extensible)
        elif out.is_dir() and any(out.iterdir()):
            given, expected = Raw("results without settings"), f"{SETTINGS} beside them"
            raise UsageError(f"--out {out}", given=given, expected=expected, fix="Give another --out.")
        write_whole(path, data)
    except (msgspec.DecodeError, AttributeError) as error:
        raise _malformed(out, error, "Give another --out.") from None
    except OSError as error:
        given, fix = Raw(error.strerror), "Give another --out."
        raise UsageError(f"--out {out}", given=given, expected="a directory to write", fix=fix) from None


def digest(directory: Path, *patterns: str) -> str:
    """Return one SHA-256 of the files of a directory that match a pattern, names included."""
    files = sorted({path for pattern in patterns for path in directory.glob(pattern)})
    return sha256("\n".join(f"{path.name} {sha256(path.read_bytes())}" for path in files).encode())


class _Line(msgspec.Struct, Generic[R]):
    part: str
    seconds: float
    record: R


def _compute(experiment: Experiment[R], part: Part) -> R:
    with watching(part.name) as watch:
        return experiment.compute(part, watch)


def _append(path: Path, line: _Line[Any]) -> None:
    """Append a line in place of an unfinished one, and wait until it is on the disk."""
    with open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _check_same(out: Path, earlier: Any, wanted: Any, extensible: tuple[str, ...]) -> None:
    there, here = dict(_flat(earlier)), dict(_flat(wanted))
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    names = [name for name in names if not name.startswith(extensible)]
    if names:
        given, expected = (", ".join(f"{name} {str(of.get(name))[:40]}" for name in names) for of in (there, here))
        fix = "Give the earlier options on the same machine, or another --out."
        raise UsageError(f"--out {out}", given=Raw(given), expected=expected, fix=fix)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _malformed(out: Path, error: Exception, fix: str) -> UsageError:
    return UsageError(f"{out / SETTINGS}", given=Raw(error), expected="settings of an experiment", fix=fix)
