"""Export of a looped run to a bundle: the graphs of its two roles, and golden sets of both and of the whole loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, LoopProgram, Manifest, Profile, Tier, Tolerance
from edge.datatypes import TensorSpec
from edge.errors import Literally, UsageError
from export.checkpoint import load
from export.convert import OPSET, golden_of, largest_difference, to_onnx
from export.exported import FULL, Exported
from export.looped import MODEL, PREFIX
from export.looped.functions import draw_prompts
from export.looped.graphs import Embed, StepGraph
from export.looped.model import PromptTransformer
from export.looped.solvers import trajectory
from export.looped.train import create

MAX_BATCH_SIZE = 64
#: Loops of a request that sets no budget, and the most that it may set.
MAX_LOOPS, MOST_LOOPS = 32, 256
TOLERANCE = 0.05
_GOLDEN_ROWS, _GOLDEN_SEED = 16, 2**42
_GOLDEN_LOOPS = 4  # before the golden step, so that its state is one of a loop in progress
_TOLERANCE = Tolerance(atol=2e-4, rtol=2e-4)


def export_looped(run: str | Path, repository: str | Path, *, version: int = 1, replace: bool = False) -> Exported:
    """Write the bundle of a run to ``repository/looped-FUNCTION-VERSION``.

    Raises:
        UsageError: the run's model is not looped.
        GoldenError: ONNX Runtime's outputs differ from torch's by more than the tolerance.
    """
    model, config, metrics = load(run, {MODEL: create})
    if model.config.injection is None:
        given, fix = Literally("an unlooped model"), "Unlooped models are a comparison; train one without --unlooped."
        raise UsageError(f"run {run}", given=given, expected="a looped model", fix=fix)
    function, shape = config.arguments["function"], model.config
    name = f"{PREFIX}{function}"
    pairs, width = shape.points - 1, shape.dim
    generator = torch.Generator().manual_seed(_GOLDEN_SEED)
    xs, ys = draw_prompts(function, _GOLDEN_ROWS, shape.points, shape.dims, generator)
    embed, step = Embed(model), StepGraph(model)
    inputs = {"xs": xs.numpy(), "ys": ys[:, :-1].numpy()}
    with torch.no_grad():
        prompt, state = embed(xs, ys[:, :-1])
        for _ in range(_GOLDEN_LOOPS):
            state = model.step(state, prompt)
    last = np.full((_GOLDEN_ROWS, 1), 2 * pairs, np.int64)
    steps = {"state": state.numpy(), "prompt": prompt.numpy(), "last": last}
    tokens = {0: "batch", 1: "tokens"}
    graphs: dict[str, tuple[nn.Module, dict[str, np.ndarray], list[str], dict[str, dict[int, str]]]] = {
        "embed": (
            embed,
            inputs,
            ["prompt", "state"],
            {"xs": {0: "batch", 1: "points"}, "ys": {0: "batch", 1: "pairs"}},
        ),
        "step": (
            step,
            steps,
            ["next_state", "prediction", "residual"],
            {"state": tokens, "prompt": tokens, "last": {0: "batch"}},
        ),
    }
    files: dict[str, bytes] = {}
    largest = 0.0
    for role, (module, arrays, outputs, dynamic) in graphs.items():
        examples = {key: torch.from_numpy(array[:2]) for key, array in arrays.items()}
        files[f"{role}.onnx"] = to_onnx(module, examples, outputs, dynamic)
        golden = golden_of(module, arrays, outputs)
        files[f"{role}.golden.npz"] = golden.encode()
        largest = max(largest, largest_difference(files[f"{role}.onnx"], golden, _TOLERANCE, f"{name} {role}"))
    files["golden.npz"] = _golden(model, inputs).encode()
    states = tuple(TensorSpec(key, "FP32", (-1, -1, width)) for key in ("prompt", "state"))
    numbers = tuple(TensorSpec(key, "FP32", (-1, 1)) for key in ("prediction", "residual"))
    at_last = TensorSpec("last", "INT64", (-1, 1))
    profile = {
        "xs": _profile((2, shape.dims), (shape.points, shape.dims)),
        "ys": _profile((1,), (pairs,)),
    }
    step_profile = {
        **{spec.name: _profile((3, width), (2 * pairs + 1, width)) for spec in states},
        "last": _profile((1,), (1,)),
    }
    client_inputs = (TensorSpec("xs", "FP32", (-1, -1, shape.dims)), TensorSpec("ys", "FP32", (-1, -1)))
    artifacts = (
        Artifact(
            file="embed.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=_TOLERANCE, role="embed",
            inputs=client_inputs, outputs=states, profile=profile, golden="embed.golden.npz",
        ),
        Artifact(
            file="step.onnx", runtime="any", precision="fp32", opset=OPSET, tolerance=_TOLERANCE, role="step",
            inputs=(*states, at_last), outputs=(TensorSpec("next_state", "FP32", (-1, -1, width)), *numbers),
            profile=step_profile, golden="step.golden.npz",
        ),
    )  # fmt: skip
    manifest = Manifest(
        name=name,
        version=version,
        description=f"Looped transformer of paper 003: {function} functions of {shape.dims} dimensions in context",
        inputs=client_inputs,
        outputs=(*numbers, TensorSpec("loops", "INT32", (-1, 1))),
        max_batch_size=MAX_BATCH_SIZE,
        profile=profile,
        tiers=(Tier(name=FULL, artifacts=artifacts),),
        golden="golden.npz",
        files={},
        provenance=config.provenance,
        program=LoopProgram(
            state="state",
            prompt="prompt",
            last="last",
            next_state="next_state",
            prediction="prediction",
            residual="residual",
            loops="loops",
            max_loops=MAX_LOOPS,
            most_loops=MOST_LOOPS,
            tolerance=TOLERANCE,
            points="xs",
            values="ys",
        ),
        measures=metrics.measures,
    )
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported(
        str(written.path), largest, sum(len(data) for file, data in files.items() if file.endswith(".onnx"))
    )


def _golden(model: PromptTransformer, inputs: dict[str, np.ndarray]) -> Golden:
    """Return the golden set of the whole loop: the outputs after :data:`MAX_LOOPS` loops, without a tolerance."""
    xs, ys = (torch.from_numpy(array) for array in inputs.values())
    path = trajectory(model, xs, ys, MAX_LOOPS)
    outputs = {
        "prediction": path.predictions[-1][:, None],
        "residual": path.residuals[-1][:, None],
        "loops": np.full((len(xs), 1), MAX_LOOPS, np.int32),
    }
    return Golden(inputs, outputs)


def _profile(least: tuple[int, ...], most: tuple[int, ...]) -> Profile:
    return Profile(min=(1, *least), opt=(8, *most), max=(MAX_BATCH_SIZE, *most))
