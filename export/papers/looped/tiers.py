"""Tiers of looped and unlooped models: ONNX files that agree with torch, and golden prompts.

The embedding of a looped model runs once for each prompt and stays FP32. A step, and an unlooped model, is FP32 for
ONNX Runtime and FP16 for TensorRT. There is no INT8, with which loops hardly settle, see RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from edge.bundles.golden import Golden, check_outputs
from edge.bundles.manifest import Profile, Tier
from edge.bundles.programs import LoopProgram
from edge.datatypes import Array, TensorSpec
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import LoopLimits, Options
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import File
from export.bundle.exported import FULL
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.tier_files import checked_file, worst_tolerance
from export.models.convert import golden_of
from export.papers.looped.model import (
    EMBED_OUTPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    UNLOOPED_OUTPUTS,
    Embed,
    PromptConfig,
    PromptTransformer,
    StepGraph,
    UnloopedGraph,
    embed_onnx,
    step_onnx,
    trajectory,
    unlooped_onnx,
)
from export.papers.looped.prompts import GOLDEN, draw_prompts, generator_of
from export.quantize.precision import fused, half

MAX_BATCH_SIZE = 64
_MAX_LOOPS = 32  # of a request that sets no budget
PROGRAM = LoopProgram(
    state="state",
    prompt="prompt",
    last="last",
    next_state="next_state",
    prediction="prediction",
    residual="residual",
    loops="loops",
    max_loops=_MAX_LOOPS,
    most_loops=256,
    tolerance=0.05,
    points="xs",
    values="ys",
)
#: Prompts of the golden sets: the first whose states settle, of four times as many.
_GOLDEN_ROWS = 16
_GOLDEN_LOOPS = 4  # before the golden step, so that its state is one of a loop in progress


def numbers(*names: str) -> tuple[TensorSpec, ...]:
    """Return outputs with a number for each row."""
    return tuple(TensorSpec(name, "FP32", (-1, 1)) for name in names)


def usual_files(plain: bytes) -> dict[str, tuple[str, bytes]]:
    """Return precision and file of a graph with layers by runtime: FP32 for ONNX Runtime, and FP16 for TensorRT."""
    return {"onnxruntime": ("fp32", fused(plain)), "tensorrt": ("fp16", half(fewest_kernels(plain), fp32_head=True))}


def looped_tier(
    model: PromptTransformer,
    function: str,
    name: str,
    runtimes: Sequence[str],
    files: dict[str, File],
    loops: dict[str, float],
) -> Tier:
    """Return the tier of a looped model, whose files agree with torch within their precision, or raise a GoldenError.

    Args:
        files: gets its files.
        loops: gets the mean of the golden prompts on ONNX Runtime.
    """
    config, embed, plain = model.config, embed_onnx(model), step_onnx(model)
    inputs, loop_golden = _golden(model, function)
    with torch.no_grad():
        prompt, state = Embed(model)(*(torch.from_numpy(array) for array in inputs.values()))
        for _ in range(_GOLDEN_LOOPS):
            state = model.step(state, prompt)
    last = np.full((_GOLDEN_ROWS, 1), state.shape[1] - 1, np.int64)
    step_inputs = dict(zip(STEP_INPUTS, (state.numpy(), prompt.numpy(), last), strict=True))
    goldens = {part: f"{name}.{part}.golden.npz" for part in ("embed", "step")}
    embed_golden = golden_of(Embed(model), inputs, EMBED_OUTPUTS)
    step_golden = golden_of(StepGraph(model), step_inputs, STEP_OUTPUTS)
    states = tuple(TensorSpec(key, "FP32", (-1, -1, config.dim)) for key in ("prompt", "state"))
    specs, profile = client_inputs(config)
    first = checked_file(
        embed,
        embed_golden,
        f"{name}.embed.onnx",
        "any",
        "fp32",
        role="embed",
        inputs=specs,
        outputs=states,
        profile=profile,
        golden=goldens["embed"],
    )
    files |= {f"{name}.golden.npz": loop_golden, goldens["embed"]: embed_golden, goldens["step"]: step_golden}
    files[first.artifact.file], artifacts = first, [first.artifact]
    tokens = _profile((3, config.dim), (2 * config.points - 1, config.dim))
    for runtime, (precision, data) in usual_files(plain).items():
        if runtime not in runtimes:
            continue
        file = f"{name}.step.{runtime}.{precision}.onnx"
        # The same tolerance holds for one step and for a whole loop.
        outputs, worst = _loop(embed, data, inputs, -1.0), worst_tolerance(step_golden, precision)
        whole = check_outputs(outputs, loop_golden, worst, f"{file}, {_MAX_LOOPS} loops").max_abs_diff
        files[file] = step = checked_file(
            data,
            step_golden,
            file,
            runtime,
            precision,
            least=whole,
            role="step",
            golden=goldens["step"],
            inputs=(*states, TensorSpec("last", "INT64", (-1, 1))),
            outputs=(TensorSpec(STEP_OUTPUTS[0], "FP32", (-1, -1, config.dim)), *numbers(*STEP_OUTPUTS[1:])),
            profile={"state": tokens, "prompt": tokens, "last": _profile((1,), (1,))},
        )
        artifacts.append(step.artifact)
        if name not in loops:
            loops[name] = float(_loop(embed, data, inputs, PROGRAM.tolerance)["loops"].mean())
    return Tier(name=name, artifacts=tuple(artifacts), golden=f"{name}.golden.npz")


def unlooped_tier(
    model: PromptTransformer, function: str, name: str, runtimes: Sequence[str], files: dict[str, File]
) -> Tier:
    """Return the tier of an unlooped model; see :func:`looped_tier`."""
    xs, ys = _golden_prompts(model.config, function, _GOLDEN_ROWS)
    inputs = {"xs": xs.numpy(), "ys": ys.numpy()}
    files[f"{name}.golden.npz"] = golden = golden_of(UnloopedGraph(model), inputs, UNLOOPED_OUTPUTS)
    artifacts = []
    for runtime, (precision, data) in usual_files(unlooped_onnx(model)).items():
        if runtime in runtimes:
            file = f"{name}.{runtime}.{precision}.onnx"
            files[file] = exported = checked_file(data, golden, file, runtime, precision)
            artifacts.append(exported.artifact)
    return Tier(name=name, artifacts=tuple(artifacts), golden=f"{name}.golden.npz")


def _golden(model: PromptTransformer, function: str) -> tuple[dict[str, Array], Golden]:
    """Return golden prompts, and the outputs after :data:`_MAX_LOOPS` loops, without a tolerance.

    Where a state does not settle, the rounding of two machines would grow with the loops. Too few that do are filled up
    with those that nearly do. Not those that settle best: tools time requests by golden prompts.
    """
    xs, ys = _golden_prompts(model.config, function, 4 * _GOLDEN_ROWS)
    path = trajectory(model, xs, ys, _MAX_LOOPS)
    rows = np.sort(np.argsort(np.maximum(path.residuals[-1], PROGRAM.tolerance), kind="stable")[:_GOLDEN_ROWS])
    inputs = {"xs": xs.numpy()[rows], "ys": ys.numpy()[rows]}
    outputs = {
        "prediction": path.predictions[-1][rows, None],
        "residual": path.residuals[-1][rows, None],
        "loops": np.full((len(rows), 1), _MAX_LOOPS, np.int32),
    }
    return inputs, Golden(inputs, outputs)


def _golden_prompts(config: PromptConfig, function: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return the points of prompts, and the values of all but the last."""
    xs, ys = draw_prompts(function, rows, config.points, config.dims, generator_of(GOLDEN))
    return xs, ys[:, :-1]


def _loop(embed: bytes, step: bytes, inputs: dict[str, Array], tolerance: float) -> dict[str, Array]:
    """Run the loops of some prompts on ONNX Runtime; no residual is below a negative tolerance."""
    with ExitStack() as stack:
        runners = [OnnxRuntimeRunner(data, subject="a graph of a loop") for data in (embed, step)]
        for runner in runners:
            stack.callback(runner.close)
        loop = Loop(PROGRAM, {FULL: LoopRunners(*runners)})
        return dict(loop.compute(inputs, Options(FULL, LoopLimits(_MAX_LOOPS, tolerance))).outputs)


def client_inputs(config: PromptConfig) -> tuple[tuple[TensorSpec, ...], dict[str, Profile]]:
    """Return what a client sends, and its profiles."""
    specs = (TensorSpec("xs", "FP32", (-1, -1, config.dims)), TensorSpec("ys", "FP32", (-1, -1)))
    pairs = config.points - 1
    return specs, {"xs": _profile((2, config.dims), (config.points, config.dims)), "ys": _profile((1,), (pairs,))}


def _profile(least: tuple[int, ...], most: tuple[int, ...]) -> Profile:
    return Profile(min=(1, *least), opt=(8, *most), max=(MAX_BATCH_SIZE, *most))
