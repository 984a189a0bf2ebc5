"""The command ``fewheads language export-head``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edge.cli.output import json_option, working
from export.bundle.exported import print_exported
from export.bundle.outputs import check_bundle, check_name
from export.training.loading import loading_torch
from export.training.options import DIRECTORY, replace_option, repository_option, version_option


@click.command("export-head")
@click.argument("run", type=DIRECTORY)
@click.option(
    "--backbone", required=True, type=DIRECTORY, help="Directory of the language model that the head was trained on."
)
@click.option("--base", required=True, type=DIRECTORY, help="Bundle of that model, of `fewheads language export`.")
@click.option("--name", required=True, help="Name of the bundle.")
@repository_option("it")
@version_option
@replace_option("an existing bundle of that name and version")
@json_option
def export_head(
    run: Path, backbone: Path, base: Path, name: str, repository: Path, version: int, replace: bool, as_json: bool
) -> None:
    """Export a head or a bias to a bundle of its own.

    RUN is one of `fewheads language head`. A server that has loaded it and its base applies it to requests to the base
    that name it as `head`.
    """
    read = {"RUN": run, "--backbone": backbone, "--base": base}
    check_bundle(repository / f"{check_name('--name', name)}-{version}", read, replace=replace)
    with loading_torch():
        from export.bundle.exportable import export_bundle
        from export.generate.model import Base
        from export.papers.backward.bundle import TrainedHead
        from export.papers.backward.training import load_head
        from export.training.runs import METRICS, RunMetrics, decode, read_config

        model = Base(backbone, "cpu")
        measures = decode(run / METRICS, RunMetrics).measures
        made = TrainedHead(load_head(run, model), base, name, model.identity, read_config(run).provenance, measures)
    started = time.perf_counter()
    with working(f"exporting {run}"):
        exported = export_bundle(made, repository, version=version, replace=replace)
    print_exported([(exported, time.perf_counter() - started)], as_json=as_json)
