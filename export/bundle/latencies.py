"""Latencies of the tiers of a bundle, for its manifest: measured on this machine, and predicted for a board."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

import msgspec
import numpy as np

from edge.bench.conditions import cpu_name
from edge.bench.timing import WARM_UP, compared, times_in_turns
from edge.bundles import golden
from edge.bundles.fields import Role
from edge.bundles.manifest import Artifact, Latency, Manifest, MeasuredLatency, PredictedLatency
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.operations import ModelWork
from export.estimate.parts import Shapes, predict_tiers, tier_files
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, check_sizes, input_shapes

_HERE, _BOARD = "onnxruntime", "tensorrt"
#: For the calls of all tiers at one length.
_SECONDS = 1.2
#: Calls of each tier. A length for which the time does not suffice for the least number is left out.
_LEAST_CALLS, _MOST_CALLS = 5, 30


def with_latencies(
    manifest: Manifest, files: Mapping[str, bytes], *, measure: bool = False, loops: Mapping[str, float] | None = None
) -> Manifest:
    """Return the manifest with the latencies of every tier.

    The prediction is for TensorRT on :data:`export.estimate.devices.DEFAULT_BOARD`, of each part of a request, with the
    kernels of the graphs' structures. To measure, ONNX Runtime runs the files in turns, for one row on one thread, for
    three seconds at most. Without a file for a runtime, there is none of it.

    Args:
        files: of the bundle, by name.
        measure: whether to measure here, too; only a model whose request is one run is.
        loops: mean of a request to each tier of a looped model, where they are known.

    Raises:
        BundleError: the work of a file cannot be counted, see :func:`export.estimate.operations.work_of`.
    """
    tiers = []
    measured = _measured(manifest, files) if measure and manifest.roles == ("model",) else {}
    predicted = _predicted(manifest, files, loops or {})
    for tier in manifest.tiers:
        latencies = (*measured.get(tier.name, ()), *predicted.get(tier.name, ()))
        tiers.append(msgspec.structs.replace(tier, latencies=latencies))
    return msgspec.structs.replace(manifest, tiers=tuple(tiers))


def _measured(manifest: Manifest, files: Mapping[str, bytes]) -> dict[str, list[Latency]]:
    artifacts = {tier: found["model"] for tier, found in _artifacts(manifest, _HERE).items()}
    first = manifest.tiers[0].name
    found: dict[str, list[Latency]] = {tier: [] for tier in artifacts}
    if not artifacts:
        return found
    rows = golden.decode(files[manifest.golden], manifest, manifest.golden).inputs
    sizes = check_sizes(manifest.inputs, manifest.profile, manifest.max_batch_size, (), (1,))
    with ExitStack() as stack:
        runners = {}
        for tier, artifact in artifacts.items():
            runners[tier] = OnnxRuntimeRunner(files[artifact.file], subject=artifact.file)
            stack.callback(runners[tier].close)
        for _, tokens in sizes:
            shapes = input_shapes(manifest.inputs, manifest.profile, manifest.max_batch_size, 1, tokens)
            feeds = {name: np.resize(rows[name], shape) for name, shape in shapes.items()}
            started = time.perf_counter()
            for runner in runners.values():
                runner.infer(feeds)
            calls = min(_MOST_CALLS, int(_SECONDS / (time.perf_counter() - started)) - WARM_UP)
            if calls < _LEAST_CALLS:
                continue
            seconds = times_in_turns(runners, feeds, calls)
            for tier, artifact in artifacts.items():
                comparison = compared(seconds[first], seconds[tier])
                found[tier].append(
                    MeasuredLatency(
                        device=cpu_name(),
                        runtime=_HERE,
                        precision=artifact.precision,
                        rows=1,
                        tokens=tokens,
                        milliseconds=comparison.milliseconds,
                        times_faster=comparison.ratio,
                        calls=calls,
                    )
                )
    return found


def _predicted(manifest: Manifest, files: Mapping[str, bytes], loops: Mapping[str, float]) -> dict[str, list[Latency]]:
    target = DEFAULT_BOARD
    batches = [batch for batch in USUAL_BATCHES if batch <= max(manifest.max_batch_size, 1)]
    artifacts = _artifacts(manifest, _BOARD)
    works: dict[str, ModelWork] = {}

    def run(tier: str, role: Role, shapes: Shapes) -> Prediction:
        file = artifacts[tier][role].file
        work = works.setdefault(file, ModelWork(files[file], file))
        return predict(work.at(shapes), None, target.mode)

    found: dict[str, list[Latency]] = {tier: [] for tier in artifacts}
    for tier, part, one, faster in predict_tiers(
        manifest, artifacts, files.__getitem__, run, batches=batches, loops=loops
    ):
        found[tier].append(
            PredictedLatency(
                device=DEVICES[target.board].name,
                power_mode=target.power_mode,
                runtime=_BOARD,
                precision=artifacts[tier][manifest.roles[-1]].precision,
                part=part.name or None,
                rows=part.rows,
                tokens=part.tokens,
                milliseconds=one.milliseconds,
                low_ms=one.low_ms,
                high_ms=one.high_ms,
                times_faster=faster,
            )
        )
    return found


def _artifacts(manifest: Manifest, runtime: str) -> dict[str, dict[Role, Artifact]]:
    """Return each tier's files for a runtime; none if the first tier, with which they are compared, has none."""
    found = {tier.name: tier_files(tier, runtime, manifest.roles) for tier in manifest.tiers}
    return {tier: files for tier, files in found.items() if files} if found[manifest.tiers[0].name] else {}
