"""``fewheads info``: the contents of bundles, or the models and measurements of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge.bench.layer_latencies import PREDICTION
from edge.bundles import manifest as manifests
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Latency, Manifest, PredictedLatency
from edge.bundles.preprocess import made_outputs
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.bundles.steps import ImagePreprocess
from edge.cli.options import PATH, connection_options
from edge.cli.output import json_option, print_json, print_table, remark, stdout
from edge.cli.view import board_facts, view
from edge.errors import Raw, ServerRefused, UsageError
from edge.protocol import TELEMETRY

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
    """Check and show BUNDLEs, or the models of the server at --url.

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
        raise UsageError("BUNDLE", given=Raw("none"), expected="a bundle directory, --url or --schema", fix=fix)


def _bundle(path: Path, manifest: Manifest) -> None:
    click.echo(f"{manifest.name} version {manifest.version} in {path}\n{manifest.description}")
    image = isinstance(manifest.preprocess, ImagePreprocess)
    tensors = [
        (f"{'image' if image else 'text'} for inputs", manifest.preprocess.inputs if manifest.preprocess else ()),
        ("input", manifest.inputs),
        ("output", manifest.outputs),
        ("made of outputs", made_outputs(manifest)),
    ]
    tiers: list[list[object]] = []
    for tier in manifest.tiers:
        for a in tier.artifacts:
            tensors += [(f"input of {a.file}", a.inputs or ()), (f"output of {a.file}", a.outputs or ())]
            size, t = manifest.files[a.file].size_bytes, a.tolerance
            limits = ", ".join(f"{name}: {atol:g}" for name, atol in t.outputs.items()) or f"{t.atol:g}"
            tolerance = f"{limits} + {t.rtol:g} |y|"
            tiers.append([tier.name, a.role, a.file, a.runtime, a.precision, a.opset, size, tolerance])
    rows = [[role, spec.name, spec.datatype, str(list(spec.shape))] for role, specs in tensors for spec in specs]
    print_table("tensors", ["role", "name", "datatype", "shape"], rows)
    columns = ["tier", "role", "file", "runtime", "precision", "opset", "bytes", "golden tolerance"]
    print_table("tiers", columns, tiers)
    spaces = {tier.name: tier.space for tier in manifest.tiers if tier.space}
    if spaces:
        space, names = next(iter(spaces.values())), ", ".join(spaces)  # a manifest has one at most
        click.echo(f"space {space}: the embeddings of {names} can be compared with all others of this space")
    print_latencies(manifest.name, {tier.name: tier.latencies for tier in manifest.tiers})
    if isinstance(manifest.preprocess, ImagePreprocess):
        _image_step(manifest.preprocess)
    _program(manifest.program)
    print_measures(manifest.name, manifest.measures)
    made = manifest.provenance
    known = {"seed": made.seed, "commit": made.git_commit}
    further = "".join(f", {name} {value}" for name, value in known.items() if value is not None)
    click.echo(f"made {made.created} by {made.trainer} from {made.data}{further}")


def print_latencies(bundle: str, tiers: Mapping[str, Sequence[Latency]]) -> None:
    """Print the latencies of a bundle's tiers by their names, each labelled; nothing if there are none."""
    columns, rows = latency_rows(tiers)
    if rows:
        print_table(f"{bundle}, latency of a run: measured, or a {PREDICTION}", columns, rows)


def print_measures(bundle: str, measures: Sequence[manifests.Measure]) -> None:
    """Print what was measured of a bundle's accuracy; nothing if that is nothing."""
    rows = [[m.metric, m.split, m.value, _interval(m.interval), m.n, m.seeds] for m in measures]
    if rows:
        print_table(f"{bundle}, measured", ["metric", "split", "value", "95 % interval", "n", "seeds"], rows)


def latency_rows(tiers: Mapping[str, Sequence[Latency]]) -> tuple[list[str], list[list[object]]]:
    """Return the columns and rows of a table of the latencies of tiers by their names, each labelled."""
    rows = [[tier, *_latency_cells(latency)] for tier, latencies in tiers.items() for latency in latencies]
    conditions = ["source", "device", "runtime", "precision", "rows", "tokens"]
    columns = ["tier", "part", *conditions, "ms", "from", "to", "times faster"]
    if not any(row[1] for row in rows):
        return columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
    return columns, rows


def _latency_cells(latency: Latency) -> tuple[object, ...]:
    source, device = "measured", latency.device
    band: tuple[float | None, float | None] = (None, None)
    if isinstance(latency, PredictedLatency):
        source, device = "prediction", f"{latency.device} at {latency.power_mode}"
        band = (latency.low_ms, latency.high_ms)
    facts = (source, device, latency.runtime, latency.precision, latency.rows, latency.tokens)
    return (latency.part, *facts, latency.milliseconds, *band, latency.times_faster)


def _image_step(step: ImagePreprocess) -> None:
    """Print what becomes of an image."""
    sides = f"both sides to {step.size}"
    if step.resize == "letterbox":
        sides = f"the longer side to {step.size}, zeros to the right or below"
    if step.resize == "crop":
        sides = f"the shorter side to {step.shorter_side or step.size}, the middle {step.size} x {step.size} kept"
    click.echo(
        f"step image: JPEG or PNG of at most {step.max_bytes} bytes and {step.max_pixels} pixels, {step.colours}, "
        f"resized ({step.interpolation}): {sides}; mean {list(step.mean)}, std {list(step.std)}"
    )


def _program(program: CascadeProgram | LoopProgram | GenerateProgram | HeadProgram | None) -> None:
    """Print how files compute an answer together."""
    if isinstance(program, LoopProgram):
        ends = f"{program.residual} is at most {program.tolerance:g} (tolerance)"
        click.echo(
            f"program loop: embed once, then step until {ends} or {program.max_loops} loops are done (max_loops); "
            f"requests may set both, and up to {program.most_loops} loops"
        )
    elif isinstance(program, GenerateProgram):
        blocks = f", in {len(program.roles)} blocks that run in turn" if program.hidden else ""
        click.echo(
            f"program generate: text token by token{blocks}, {program.max_tokens} tokens unless the request says "
            f"otherwise, and {program.positions} with the prompt at most"
        )
    elif isinstance(program, HeadProgram):
        base = program.base
        click.echo(
            f"program head: moves the logits of {base.name} {base.version}, in requests to it that name this head; "
            f"alpha is {program.usual_alpha:g} unless they say otherwise"
        )
    elif program:
        default = " by default" if program.default else ""
        click.echo(
            f"program cascade: auto is {program.lean}{default}, and {program.full} where the two largest probabilities "
            f"differ by less than {program.margin:g}"
        )


def _interval(interval: tuple[float, float] | None) -> str:
    return f"{interval[0]:.4g} … {interval[1]:.4g}" if interval else ""


def _server(url: str, credentials: Credentials | None, as_json: bool) -> None:
    from edge.client import Client
    from edge.telemetry.window import between

    with Client(url, credentials=credentials) as client:
        models = client.index()
        reading, left_out = _reading(client)
    if as_json:
        empty: dict[str, Any] = {"memory_bytes": None, "latency": None, "energy": None, "board": None}
        measured = _measured(reading) if reading else empty
        print_json({"url": url, "models": models, **measured, "left_out": left_out})
        return
    print_table(url, ["model", "version", "state", "reason"], [list(model.values()) for model in models])
    if not reading:
        remark(left_out)
        return
    stdout.print(view(url, reading, between(None, reading), stdout.width))


def _reading(client: Client) -> tuple[Reading | None, str]:
    """Return a reading; or None, and the reason for leaving out latency and memory."""
    from edge.security.access import RPC_SCOPES, TELEMETRY_GET

    try:
        return client.telemetry(), ""
    except ServerRefused as error:
        if error.code == "UNIMPLEMENTED":
            return None, f"Left out: latency and memory. This server has no {TELEMETRY}."
        if error.code != "PERMISSION_DENIED":
            raise
        scopes = " or ".join(sorted(RPC_SCOPES[TELEMETRY_GET]))
        return None, f"Left out: latency and memory. A token of the scope {scopes} shows them."


def _measured(reading: Reading) -> dict[str, Any]:
    latency: dict[str, Any] = {}
    energy = []
    for model in reading.models:
        name, fields = f"{model.name}:{model.version}", ("count", "p50_ns", "p95_ns", "p99_ns")
        latency[name] = {stage.stage: {key: getattr(stage, key) for key in fields} for stage in model.stages}
        for of in model.energy:
            row = {"model": name, "tier": of.tier, "requests": of.requests, "joules": of.joules}
            row["joules_per_request"] = of.joules / of.requests if of.requests else None
            row["joules_per_token"] = of.joules / of.tokens if of.tokens else None
            energy.append(row)
    memory = {sample.kind: sample.size_bytes for sample in reading.memory}
    return {"memory_bytes": memory, "latency": latency, "energy": energy, "board": board_facts(reading)}
