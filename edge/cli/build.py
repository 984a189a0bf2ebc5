"""``fewheads build``: build models for a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.cli.output import json_option, print_json, print_table, progress, stderr
from edge.runtimes.table import targets

if TYPE_CHECKING:
    from edge.runtimes.build import Built


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--target", default="auto", show_default=True, help=f"One of {targets()}.")
@click.option("--tier", help="The size of the model.  [default: the full one]")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="The cache.  [default: $FEWHEADS_CACHE or ~/.cache/fewheads]"
)
@json_option
def build(bundles: tuple[Path, ...], target: str, tier: str | None, cache: Path | None, as_json: bool) -> None:
    """Build each BUNDLE for a runtime, check it against its golden set, and put it into the cache.

    TensorRT-RTX compiles for a desktop GPU without having one: proof that a model compiles, and whether its attention
    becomes one kernel.
    """
    from edge.bundles.bundle import Bundle
    from edge.runtimes.build import build as build_bundle

    done = []
    with progress() as bar:
        for path in bundles:
            stderr.print(f"building {path} for {target}")
            task = bar.add_task(path.name, total=None, note="")
            done.append(
                build_bundle(
                    Bundle.open(path),
                    target,
                    cache,
                    tier=tier,
                    progress=lambda phase, step, steps, task=task: bar.update(  # type: ignore[misc]
                        task, completed=step, total=steps, note=phase
                    ),
                )
            )
            bar.update(task, completed=1, total=1, note="done")
    if as_json:
        print_json([{"directory": str(one.directory), "reused": one.reused, "build": one.record} for one in done])
        return
    for one in done:
        record = one.record
        print_table(f"{record.name} {record.version} ({record.tier})", ["build", ""], _rows(one))


def _rows(built: Built) -> list[tuple[str, str]]:
    record = built.record
    rows = [
        ("runtime", f"{record.runtime} {record.runtime_version} on {record.device}"),
        ("why", record.reason),
        ("where", str(built.directory / record.file)),
        ("size", f"{record.size_bytes / 1024:.1f} KiB"),
        ("time", "0 s, it was there already" if built.reused else f"{record.seconds:.2f} s"),
    ]
    if record.golden:
        rows.append(("golden", f"largest difference {record.golden.max_abs_diff:.3g} in {record.golden.rows} rows"))
    else:
        rows.append(("golden", record.golden_skipped or "not run"))
    if record.engine:
        rows.append(("layers", f"{record.engine.layers} in the network"))
        rows.append(("attention", record.engine.attention))
        rows += [("warning", warning) for warning in record.engine.warnings]
    return rows
