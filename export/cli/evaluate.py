"""The command ``fewheads evaluate``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.output import json_option, print_json, remark, working
from edge.errors import Raw, UsageError
from edge.files import replaced_directory, write_durably
from export.bundle.outputs import check_results
from export.report.embeddings import GROUPS, RECORDS, REPORT, Group
from export.training.loading import all_cores, loading_torch
from export.training.options import DIRECTORY, data_dir_option, device_option, replace_option

# torch takes seconds to import, so only the command's body does it.
if TYPE_CHECKING:
    from export.training.device import DeviceName
#: Above so many texts, several cores are worth their synchronisation.
_MANY_TEXTS = 10_000


def _groups(context: click.Context, option: object, value: str | None) -> Any:
    groups = tuple(part.strip() for part in value.split(",")) if value else ()
    wrong = [group for group in groups if group not in GROUPS]
    if wrong:
        expected, fix = f"some of {', '.join(GROUPS)}", "Give them with commas between, or leave --only out."
        raise UsageError("--only", given=Raw(", ".join(wrong)), expected=expected, fix=fix)
    return groups


@click.command()
@click.argument("runs", metavar="RUN...", type=DIRECTORY, nargs=-1, required=True)
@data_dir_option
@click.option(
    "--documents",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Text with a passage in each line, plain or .xz, of which at most 20,000 are further documents of retrieval: "
    "some of those that `reduce --distil` with the same file holds out.",
)
@click.option(
    "--only",
    metavar="GROUPS",
    callback=_groups,
    help="Measure only some of sts,retrieval,probes,mixed.  [default: all whose data are there]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for records.jsonl and report.md. Until they are written, embeddings are kept beside it, in "
    ".OUT.embeddings.",
)
@device_option
@replace_option("an earlier evaluation at --out")
@json_option
def evaluate(
    runs: tuple[Path, ...],
    data_dir: Path,
    documents: Path | None,
    only: Sequence[Group],
    out: Path | None,
    device: DeviceName,
    replace: bool,
    as_json: bool,
) -> None:
    """Measure the embeddings of runs, and compare them with those of the first RUN, the original.

    Similarity on STS, STS-B and SICK; retrieval of QNLI's and XQuAD's answers; linear probes on SST-2, CoLA and MRPC;
    and retrieval with questions embedded by one run and documents by another, if both have one space. The same command
    resumes an interrupted evaluation with --out.
    """
    names = [run.resolve().name for run in runs]
    if len({*names}) < len(names):
        fix = "Rename one of them."
        raise UsageError("RUN", given=Raw(", ".join(names)), expected="directories of different names", fix=fix)
    if "mixed" in only and len(runs) == 1:
        fix = "Give the original and its tiers."
        raise UsageError("--only mixed", given=Raw("one run"), expected="two at least", fix=fix)
    if documents and only and not {"retrieval", "mixed"} & {*only}:
        given, expected = Raw(f"--only {','.join(only)}"), "retrieval or mixed in it, which search documents"
        raise UsageError("--documents", given=given, expected=expected, fix="Leave one of the two options out.")
    if out:
        inputs = {**{f"RUN {run}": run for run in runs}, "--data-dir": data_dir, "--documents": documents}
        files = (RECORDS, REPORT)
        check_results("--out", out, inputs, files=files, what="report", replace=replace)
    with loading_torch("loading torch and data"):
        from export.data.evaluation import SOURCES
        from export.report.embeddings.embed import open_embedder
        from export.report.embeddings.evaluate import evaluate as measure
        from export.report.embeddings.evaluate import space_errors
        from export.report.embeddings.records import encode_records, tables
        from export.report.embeddings.sets import read_sets

        opened = [open_embedder(run, device) for run in runs]
        sets = read_sets(data_dir, documents, only, len(runs))
    if sets.questions and documents is None:
        remark("retrieval: among the documents of each set alone, which makes it easy; --documents adds passages")
    if sets.passages.left_out:
        remark(f"{documents}: {sets.passages.left_out} documents with a sentence of an evaluation set are left out")
    for group in () if only else [group for group in SOURCES if group not in sets.groups]:
        remark(f"{group}: not measured, because {data_dir} lacks {SOURCES[group]}")
    other_space = space_errors(opened) if "mixed" in sets.groups else {}
    for error in other_space.values():
        if "mixed" in only:
            raise error
        remark(f"{error.subject}: not measured, because of {error.given}, where {error.expected} is expected")
    cache = out and out.parent / f".{out.name}.embeddings"
    with all_cores(sets.texts > _MANY_TEXTS), working("embedding") as update:
        records = measure(opened, sets, cache, update, other_space=other_space)
    found = tables(records)
    if out:
        page = [
            "# Evaluation of embeddings",
            *(line for one in found for line in ("", f"## {one.title}", "", *one.markdown())),
        ]
        with replaced_directory(out) as new:
            write_durably(new / RECORDS, encode_records(records))
            write_durably(new / REPORT, "\n".join([*page, ""]).encode())
        if cache:
            shutil.rmtree(cache, ignore_errors=True)
    if as_json:
        print_json(records)
        return
    for one in found:
        one.print()
