"""Model cards: ``README.md`` of a run or a bundle, in Markdown, with the metadata that model hubs read in front.

The fields are those of Hugging Face's model cards: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.bundles.manifest import Manifest, Measure, Provenance
from edge.bundles.programs import GenerateProgram
from edge.bundles.steps import (
    BoxPostprocess,
    ImagePreprocess,
    LabelPostprocess,
    ScorePostprocess,
    SpanPostprocess,
    TokenizerPreprocess,
    TokenLabelPostprocess,
)
from edge.cli.info import latency_rows
from export.report.table import Table
from export.training.runs import RunConfig, RunMetrics


def bundle_card(manifest: Manifest) -> str:
    """Return the card of a bundle, before its files are known."""
    heads, rows = latency_rows({tier.name: tier.latencies for tier in manifest.tiers})
    files = [
        (tier.name, artifact.file, artifact.runtime, artifact.precision, artifact.opset)
        for tier in manifest.tiers
        for artifact in tier.artifacts
    ]
    tables = [Table("Files", ("tier", "file", "for", "precision", "opset"), files, texts=4)]
    if rows:
        note = "Measured, or a prediction: no Jetson has measured those."
        tables.append(Table("Latency of a run", heads, rows, texts=1, note=note))
    serve = f"fewheads serve {manifest.name}-{manifest.version}    # the directory of this file, over gRPC"
    about = [manifest.description, *_shared_space(manifest), "", "```", serve, "```"]
    return _card(
        *(f"{manifest.name} {manifest.version}", about, _task_of(manifest), manifest.measures),
        *(tables, manifest.provenance),
        tags=("onnx", "tensorrt", "jetson"),
    )


def run_card(name: str, config: RunConfig, metrics: RunMetrics) -> str:
    """Return the card of a run in a directory of this name."""
    task = str(config.arguments.get("task", ""))
    about = [f"{config.model} with {metrics.parameters:,} parameters" + (f", for {task}." if task else ".")]
    if config.planned:
        planned = config.planned
        kept = f"{len(planned.kept)} of {planned.original_layers} layers"
        about.append(f"Reduced to be {planned.target_speedup:g} times as fast on {planned.device}: {kept} are left.")
    command = f"fewheads export {name} --name NAME    # makes a bundle, which fewheads serve takes"
    about += ["", "```", command, "```"]
    return _card(
        name, about, _task_of_run(config.arguments), metrics.measures, [], config.provenance, tags=("safetensors",)
    )


def _card(
    title: str,
    about: Sequence[str],
    task: str,
    measures: Sequence[Measure],
    tables: Iterable[Table],
    origin: Provenance,
    *,
    tags: Sequence[str],
) -> str:
    lines = ["---", "library_name: fewheads"]
    if task:
        lines.append(f"pipeline_tag: {task}")
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    results = [_result(task, measure) for measure in measures]
    if results:  # JSON is YAML, too
        index = json.dumps([{"name": title, "results": results}], ensure_ascii=False)
        lines.append(f"model-index: {index}")
    lines += ["---", "", f"# {title}", "", *about]
    if measures:
        rows = [(one.metric, one.split, one, one.n, one.seeds) for one in measures]
        heads, note = ("metric", "split", "value", "items", "seeds"), "In parentheses are 95 % intervals."
        tables = [Table("Accuracy", heads, rows, texts=2, note=note), *tables]
    for table in tables:
        lines += ["", f"## {table.title}", "", *table.markdown()]
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    facts: Mapping[str, object] = {
        "Made": f"{origin.created} by {origin.trainer}",
        "Data": origin.data,
        "Seed": origin.seed,
        "Versions": versions,
    }
    lines += ["", "## Origin", "", *(f"- {name}: {fact}" for name, fact in facts.items() if fact not in (None, ""))]
    return "\n".join([*lines, ""])


def _result(task: str, measure: Measure) -> dict[str, object]:
    metric = {"type": measure.metric, "value": measure.value, "name": f"{measure.metric}, {measure.split}"}
    dataset = {"type": measure.split, "name": measure.split}
    return {"task": {"type": task or "other"}, "dataset": dataset, "metrics": [metric]}


def _shared_space(manifest: Manifest) -> list[str]:
    space = manifest.space
    return [f"The embeddings of all tiers can be compared with one another (space {space})."] if space else []


def _task_of(manifest: Manifest) -> str:
    before, after, program = manifest.preprocess, manifest.postprocess, manifest.program
    if isinstance(program, GenerateProgram):
        return "text-generation"
    if isinstance(before, ImagePreprocess) and isinstance(after, LabelPostprocess):
        return "image-classification"
    if isinstance(after, BoxPostprocess):
        return "object-detection"
    if not isinstance(before, TokenizerPreprocess):
        return ""
    kinds = {
        LabelPostprocess: "text-classification",
        TokenLabelPostprocess: "token-classification",
        SpanPostprocess: "question-answering",
    }
    if isinstance(after, ScorePostprocess):
        return "text-ranking" if before.pair else "text-classification"
    return kinds.get(type(after), "") if after else "feature-extraction" if manifest.space else ""


def _task_of_run(arguments: Mapping[str, Any]) -> str:
    """Return what the hub calls the task of a run, by the head that its arguments describe; empty for other models."""
    labels, shape = arguments.get("labels"), arguments.get("transformer")
    if not shape:
        return ""
    if arguments.get("embedding"):
        return "feature-extraction"
    if not labels:
        return "question-answering"
    if shape.get("architecture") == "vit":
        return "image-classification"
    if arguments.get("per_token"):
        return "token-classification"
    return "text-ranking" if arguments.get("pair") and len(labels) == 1 else "text-classification"
