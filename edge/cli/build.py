"""``fewheads build``: models for a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.cli.options import bundles_argument, cache_option
from edge.cli.output import json_option, print_json, print_table, progress, remark
from edge.runtimes.runtime import DEFAULT_WORKSPACE_BYTES, BuildOptions, BuildProgress
from edge.runtimes.table import targets
from edge.runtimes.tensorrt.package import skips_a_tactic

if TYPE_CHECKING:
    from rich.progress import TaskID

    from edge.bundles.bundle import Bundle
    from edge.bundles.fields import Role
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
    """Build every tier of each BUNDLE for a runtime, check it against its golden set, and put it into the cache.

    TensorRT-RTX compiles for a desktop GPU that this machine need not have. That shows whether a model compiles, and
    whether its attention becomes one kernel.
    """
    from edge.bundles.bundle import Bundle
    from edge.runtimes.build import build as build_bundle
    from edge.runtimes.table import choose

    options = BuildOptions(workspace_bytes=workspace_mib * _MIB, **limits)
    opened = [Bundle.open(path) for path in bundles]  # fail before any work
    files = [_files(bundle, tier) for bundle in opened]
    if target != "auto":
        runtime = choose(target)
        for bundle, of_bundle in zip(opened, files, strict=True):
            for of_tier, role in of_bundle:
                runtime.artifact(bundle, of_tier, role)
    done = []
    with progress() as bar:
        for path, bundle, of_bundle in zip(bundles, opened, files, strict=True):
            remark(f"building {path} for {target}")
            task = bar.add_task(path.name, total=None, note="")

            for of_tier, role in of_bundle:
                step = f"tier {of_tier}" + (f" {role}" if len(bundle.manifest.roles) > 1 else "")

                def show(position: BuildProgress, task: TaskID = task, step: str = step) -> None:
                    note = f"{step}, {note_of(position)}"
                    bar.update(task, completed=round(position.fraction * 100), total=100, note=note)

                given = (bundle, target, cache)
                built = build_bundle(*given, tier=of_tier, role=role, options=options, replace=replace, progress=show)
                done.append((f"{built.record.name} {built.record.version} ({step.removeprefix('tier ')})", built))
            bar.update(task, completed=100, total=100, note="done")
    if as_json:
        print_json([{"directory": str(one.directory), "reused": one.reused, "build": one.record} for _, one in done])
        return
    for title, one in done:
        print_table(title, ["build", ""], _rows(one))


def _files(bundle: Bundle, tier: str | None) -> list[tuple[str, Role]]:
    """Return the tiers and roles to build; raise a BundleError if there is no such tier."""
    names = [one.name for one in bundle.manifest.tiers] if tier is None else [bundle.tier(tier).name]
    return [(name, role) for name in names for role in bundle.manifest.roles]


def note_of(position: BuildProgress) -> str:
    """Return the time left and the step; the bar itself shows the percentage."""
    left = str(position).partition(", ")[2]
    return f"{left}: {position.phase}" if left else position.phase


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
        rows.append(("layers", f"{engine.layers} in the network, {engine.typing}ly typed"))
        rows += [("profile", profile) for profile in engine.profiles]
        rows.append(("attention", engine.attention))
        rows.append(("timing cache", engine.timing_cache))
        shown = [warning for warning in engine.warnings if not skips_a_tactic(warning)]  # a note counts the others
        rows += [("warning", warning) for warning in (*engine.notes, *shown)]
    return rows
