"""``fewheads build``: models for a runtime."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import bundles_argument, cache_option
from edge.cli.output import json_option, print_json, print_table, progress
from edge.runtimes.runtime import DEFAULT_WORKSPACE_BYTES, BuildOptions, BuildProgress
from edge.runtimes.table import targets
from edge.runtimes.tensorrt.package import skips_a_tactic

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edge.runtimes.build import Built

_MIB = 1024**2


@click.command()
@bundles_argument
@click.option("--target", default="auto", show_default=True, help=f"One of {targets()}.")
@click.option("--tier", help="Tier to build.  [default: all]")
@cache_option
@click.option(
    "--workspace-mib",
    type=click.IntRange(16, 65536),
    default=DEFAULT_WORKSPACE_BYTES // _MIB,
    show_default=True,
    help="Limit of the scratch memory of one layer in a TensorRT engine.",
)
@click.option("--require-fused-attention", is_flag=True, help="Fail if attention does not become one kernel.")
@click.option("--ignore-memory", is_flag=True, help="Build even if the estimate exceeds the memory.")
@click.option("--replace", is_flag=True, help="Build again even if the cache holds the model.")
@json_option
def build(
    bundles: tuple[Path, ...],
    target: str,
    tier: str | None,
    cache: Path | None,
    workspace_mib: int,
    replace: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Build each BUNDLE for a runtime, check it, and cache it.

    Every tier is checked against the golden set of its bundle.

    TensorRT-RTX compiles for a desktop GPU that this machine need not have. That shows whether a model compiles, and
    whether its attention becomes one kernel.
    """
    from edge.bundles.bundle import Bundle
    from edge.runtimes.build import build as build_bundle
    from edge.runtimes.table import choose

    options = BuildOptions(workspace_bytes=workspace_mib * _MIB, **limits)
    files = [
        (bundle, of_tier, role)
        for bundle in [Bundle.open(path) for path in bundles]  # fail before any work
        for of_tier in ([bundle.tier(tier)] if tier else bundle.manifest.tiers)
        for role in bundle.manifest.roles
    ]
    if target != "auto":
        for bundle, of_tier, role in files:
            choose(target).artifact(bundle, of_tier.name, role)
    done: list[tuple[str, Built]] = []
    with progress() as bar:
        for bundle, of_tier, role in files:
            file = f"{of_tier.name} {role}" if len(bundle.manifest.roles) > 1 else of_tier.name
            name = f"{bundle.manifest.name} {bundle.manifest.version} ({file})"
            task = bar.add_task(name, total=100, note=f"for {target}")
            show, given = partial(_show, bar, task), (bundle, target, cache)
            built = build_bundle(*given, tier=of_tier.name, role=role, options=options, replace=replace, progress=show)
            bar.update(task, completed=100, note="done")
            done.append((name, built))
    if as_json:
        print_json([{"directory": str(it.directory), "reused": it.reused, "build": it.record} for _, it in done])
        return
    for name, built in done:
        print_table(name, ["build", ""], _rows(built))


def _show(bar: Progress, task: TaskID, position: BuildProgress) -> None:
    left = str(position).partition(", ")[2]  # the bar itself shows the percentage
    note = f"{left}: {position.phase}" if left else position.phase
    bar.update(task, completed=round(position.fraction * 100), note=note)


def _rows(built: Built) -> list[tuple[str, str]]:
    record = built.record
    rows = [
        ("runtime", f"{record.runtime} {record.runtime_version} on {record.device}"),
        ("why", record.reason),
        ("where", str(built.directory / record.file)),
        ("size", f"{record.size_bytes / 1024:.1f} KiB"),
        ("time", "0 s, it was there already" if built.reused else f"{record.seconds:.2f} s"),
    ]
    golden = record.golden
    difference = f"largest difference {golden.max_abs_diff:.3g} in {golden.rows} rows" if golden else ""
    rows.append(("golden", difference or record.golden_skipped or "not run"))
    if record.engine:
        engine = record.engine
        rows.append(("layers", f"{engine.layers} in the network"))
        rows += [("profile", profile) for profile in engine.profiles]
        rows.append(("attention", engine.attention))
        rows.append(("timing cache", engine.timing_cache))
        shown = [warning for warning in engine.warnings if not skips_a_tactic(warning)]  # a note counts the others
        rows += [("warning", warning) for warning in (*engine.notes, *shown)]
    return rows
