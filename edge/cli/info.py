"""``fewheads info``: the contents of bundles, or the models and measurements of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge.bundles import manifest as manifests
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Manifest
from edge.cli.options import PATH, connection_options
from edge.cli.output import json_option, print_json, print_table, remark
from edge.cli.view import board_facts
from edge.errors import Literally, ServerRefused, UsageError
from edge.protocol import TELEMETRY
from edge.security.scopes import RPC_SCOPES, TELEMETRY_GET

if TYPE_CHECKING:
    from edge.client import Client
    from edge.client.connection import Credentials
    from edge.telemetry.window import Reading


@click.command()
@click.argument("bundles", nargs=-1, type=PATH, metavar="[BUNDLE]...")
@click.option("--url", help="Show a server instead, for example 127.0.0.1:8001.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of manifest.json.")
@connection_options
@json_option
def info(
    bundles: tuple[Path, ...], url: str | None, schema: bool, credentials: Credentials | None, as_json: bool
) -> None:
    """Check BUNDLEs and show their contents; or show the models of the server at --url.

    On a server with tokens, the models need a token of any scope, latency and memory one of the scope `metrics`.
    """
    if schema:
        print_json(manifests.schema())
    elif url:
        _server(url, credentials, as_json)
    elif bundles:
        opened = [Bundle.open(path) for path in bundles]
        if as_json:
            print_json([bundle.manifest for bundle in opened])
        else:
            for bundle in opened:
                _bundle(bundle.path, bundle.manifest)
    else:
        fix = "Try: fewheads info .demo/repository/*"
        raise UsageError("BUNDLE", given=Literally("none"), expected="a bundle directory, --url or --schema", fix=fix)


def _bundle(path: Path, manifest: Manifest) -> None:
    click.echo(f"{manifest.name} version {manifest.version} in {path}\n{manifest.description}")
    tensors = [
        ("text for inputs", manifest.preprocess.inputs if manifest.preprocess else ()),
        ("input", manifest.inputs),
        ("output", manifest.outputs),
        ("made of outputs", (manifest.postprocess.made,) if manifest.postprocess else ()),
    ]
    artifacts = [(tier.name, artifact) for tier in manifest.tiers for artifact in tier.artifacts]
    for _, artifact in artifacts:
        tensors.append((f"input of {artifact.file}", artifact.inputs or ()))
        tensors.append((f"output of {artifact.file}", artifact.outputs or ()))
    print_table(
        "tensors",
        ["role", "name", "datatype", "shape"],
        [[role, spec.name, spec.datatype, str(list(spec.shape))] for role, specs in tensors for spec in specs],
    )
    print_table(
        "tiers",
        ["tier", "role", "file", "runtime", "precision", "opset", "bytes"],
        [
            [tier, a.role, a.file, a.runtime, a.precision, a.opset, manifest.files[a.file].size_bytes]
            for tier, a in artifacts
        ],
    )
    if manifest.measures:
        print_table(
            "measured",
            ["metric", "split", "value", "95 % interval", "n", "seeds"],
            [[m.metric, m.split, m.value, _interval(m.interval), m.n, m.seeds] for m in manifest.measures],
        )
    made = manifest.provenance
    click.echo(f"made {made.created} by {made.trainer} from {made.data}, seed {made.seed}, commit {made.git_commit}")


def _interval(interval: tuple[float, float] | None) -> str:
    return f"{interval[0]:.4g} … {interval[1]:.4g}" if interval else ""


def _server(url: str, credentials: Credentials | None, as_json: bool) -> None:
    from edge.client import Client

    with Client(url, credentials=credentials) as client:
        models = client.index()
        reading, left_out = _reading(client)
    memory = {sample.kind: sample.size_bytes for sample in reading.memory} if reading else None
    latency = _latency(reading) if reading else None
    energy = _energy(reading) if reading else None
    board = board_facts(reading) if reading else None
    if as_json:
        measured = {"memory_bytes": memory, "latency": latency, "energy": energy, "board": board}
        print_json({"url": url, "models": models, **measured, "left_out": left_out})
        return
    print_table(url, ["model", "version", "state", "reason"], [list(model.values()) for model in models])
    if latency is None or memory is None:
        remark(left_out)
        return
    rows = [
        [name, stage, times["count"], *(times[key] / 1e6 for key in ("p50_ns", "p95_ns", "p99_ns"))]
        for name, stages in latency.items()
        for stage, times in stages.items()
        if times["count"]
    ]
    print_table("latency", ["model", "stage", "count", "p50 ms", "p95 ms", "p99 ms"], rows)
    if energy:
        columns = ["model", "tier", "requests", "joules", "joules/request", "joules/token"]
        print_table("energy above idle", columns, [list(row.values()) for row in energy])
    print_table("memory", ["kind", "MiB"], [[kind, size / 2**20] for kind, size in memory.items()])
    if board:
        print_table("board", ["fact", "value"], [[name, str(value)] for name, value in board.items()])


def _reading(client: Client) -> tuple[Reading | None, str]:
    """Return a reading; or None, and the reason for leaving out latency and memory."""
    try:
        return client.telemetry(), ""
    except ServerRefused as error:
        if error.code == "UNIMPLEMENTED":
            return None, f"Left out: latency and memory. This server has no {TELEMETRY}."
        if error.code != "PERMISSION_DENIED":
            raise
        scopes = " or ".join(sorted(RPC_SCOPES[TELEMETRY_GET]))
        return None, f"Left out: latency and memory. A token of the scope {scopes} shows them."


def _energy(reading: Reading) -> list[dict[str, object]]:
    return [
        {
            "model": f"{model.name}:{model.version}",
            "tier": of.tier,
            "requests": of.requests,
            "joules": of.joules,
            "joules_per_request": of.joules / of.requests if of.requests else None,
            "joules_per_token": of.joules / of.tokens if of.tokens else None,
        }
        for model in reading.models
        for of in model.energy
    ]


def _latency(reading: Reading) -> dict[str, dict[str, dict[str, int]]]:
    """Return count and percentiles by model and stage."""
    fields = ("count", "p50_ns", "p95_ns", "p99_ns")
    return {
        f"{model.name}:{model.version}": {
            stage.stage: {field: getattr(stage, field) for field in fields} for stage in model.stages
        }
        for model in reading.models
    }
