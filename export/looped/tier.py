"""Files of a tier: the graphs of both roles for each runtime, with their golden sets and tolerances.

The embedding runs once for each prompt and stays FP32. A step is FP32 for ONNX Runtime and FP16 for TensorRT; its INT8
twin is a tier of its own, and written only if its loops are about as good.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from edge.bundles.golden import Golden, check_outputs
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.bundles.programs import LoopProgram
from edge.datatypes import Array, TensorSpec
from edge.errors import UsageError
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import LoopLimits, Options
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, int8_tier
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.tier_files import allowed_tolerance, worst_tolerance
from export.models.convert import OPSET, golden_of, largest_difference
from export.papers.looped.functions import draw_prompts, squared_errors
from export.papers.looped.graphs import (
    EMBED_OUTPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Embed,
    StepGraph,
    embed_onnx,
    step_onnx,
)
from export.papers.looped.model import PromptConfig, PromptTransformer
from export.papers.looped.seeds import CALIBRATION, GOLDEN, JUDGED, generator_of
from export.papers.looped.solvers import trajectory
from export.quantize.dynamic import dynamic_int8
from export.quantize.precision import fused, half
from export.quantize.ranges import Feeds, Scheme, input_ranges
from export.quantize.static import INT8_OPSET, static_int8

MAX_BATCH_SIZE = 64
#: Loops of a request that sets no budget, and the most that it may set.
MAX_LOOPS, MOST_LOOPS = 32, 256
TOLERANCE = 0.05
PROGRAM = LoopProgram(
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
)
#: Prompts of the golden sets: those whose states settle best of four times as many.
_GOLDEN_ROWS = 16
_GOLDEN_LOOPS = 4  # before the golden step, so that its state is one of a loop in progress
#: Prompts that calibrate INT8, and that judge it.
_CALIBRATION_ROWS, _JUDGED_ROWS = 16, 256
#: Errors and loops that an INT8 tier may have, in units of those in FP32.
_LARGEST_INT8_LOSS = 1.1


class TierFiles(NamedTuple):
    """A tier, its files by name, and the largest absolute difference of each ONNX file's outputs to torch's.

    ``loops`` are the mean of the golden prompts on ONNX Runtime, within the program's limits.
    """

    tier: Tier
    files: dict[str, bytes]
    differences: dict[str, float]
    loops: float


class Quality(NamedTuple):
    """Normalised squared errors of a loop after all its steps and at the tolerance, and mean loops at the tolerance."""

    error: float
    settled_error: float
    loops: float


class Step(NamedTuple):
    """The step graph for one runtime."""

    runtime: str
    precision: str
    opset: int
    data: bytes

    @property
    def rows_at_once(self) -> bool:
        """Whether requests share its runs. Dynamic INT8 has one scale for all rows of a run, so there they do not."""
        return (self.runtime, self.precision) != ("onnxruntime", "int8")


def tier_files(model: PromptTransformer, function: str, name: str, *, int8: bool) -> list[TierFiles]:
    """Return the tier of a model, and with ``int8`` its twin, ``NAME-int8``.

    Raises:
        GoldenError: ONNX Runtime's outputs differ from torch's by more than the precision allows.
        UsageError: loops in INT8 are worse, or more.
    """
    embed, plain = embed_onnx(model), step_onnx(model)
    tiers = [_files(model, function, name, embed, usual_steps(plain))]
    if int8:
        twin = int8_steps(plain, model, function)
        wanted = quality(embed, plain, function, model.config)
        for step in twin:
            found = quality(embed, step.data, function, model.config, rows_at_once=step.rows_at_once)
            for what, got, most in zip(Quality._fields, found, wanted, strict=True):
                if got > _LARGEST_INT8_LOSS * most:
                    subject = f"{what.replace('_', ' ')} of tier {name} in INT8 for {step.runtime}"
                    expected = f"{_LARGEST_INT8_LOSS * most:.4g} at most, {_LARGEST_INT8_LOSS} times that in FP32"
                    raise UsageError(subject, given=round(got, 5), expected=expected, fix="Leave --int8 out.")
        tiers.append(_files(model, function, int8_tier(name), embed, twin))
    return tiers


def usual_steps(plain: bytes) -> list[Step]:
    """Return the steps of a tier from the step graph: FP32 for ONNX Runtime, and FP16 for TensorRT."""
    return [
        Step("onnxruntime", "fp32", OPSET, fused(plain)),
        Step("tensorrt", "fp16", OPSET, half(fewest_kernels(plain), fp32_head=True)),
    ]


def int8_steps(plain: bytes, model: PromptTransformer, function: str) -> list[Step]:
    """Return the steps of a tier in INT8: with scales computed at run time for ONNX Runtime, and fixed for TensorRT."""
    static = static_int8(plain, input_ranges(plain, calibration(model, function), Scheme()), fp32_head=True)
    return [
        Step("onnxruntime", "int8", OPSET, dynamic_int8(plain)),
        Step("tensorrt", "int8", INT8_OPSET, static),
    ]


def quality(embed: bytes, step: bytes, function: str, config: PromptConfig, *, rows_at_once: bool = True) -> Quality:
    """Run the loops of some prompts on ONNX Runtime, together or one by one, and return how good they are."""
    xs, ys = draw_prompts(function, _JUDGED_ROWS, config.points, config.dims, generator_of(JUDGED))
    inputs = {"xs": xs.numpy(), "ys": ys[:, :-1].numpy()}
    found = []
    for tolerance in (-1.0, TOLERANCE):  # no residual is below 0
        outputs = _loop(embed, step, inputs, tolerance, rows=_JUDGED_ROWS if rows_at_once else 1)
        errors = squared_errors(function, config.dims, outputs["prediction"][:, 0], ys[:, -1].numpy())
        found.append((float(errors.mean()), float(outputs["loops"].mean())))
    (error, _), (settled_error, loops) = found
    return Quality(error, settled_error, loops)


def client_inputs(config: PromptConfig) -> tuple[tuple[TensorSpec, ...], dict[str, Profile]]:
    """Return what a client sends, and its profiles."""
    specs = (TensorSpec("xs", "FP32", (-1, -1, config.dims)), TensorSpec("ys", "FP32", (-1, -1)))
    pairs = config.points - 1
    return specs, {"xs": _profile((2, config.dims), (config.points, config.dims)), "ys": _profile((1,), (pairs,))}


def numbers() -> tuple[TensorSpec, ...]:
    """Return the outputs of a step that a client gets."""
    return tuple(TensorSpec(name, "FP32", (-1, 1)) for name in STEP_OUTPUTS[1:])


def _files(model: PromptTransformer, function: str, name: str, embed: bytes, steps: list[Step]) -> TierFiles:
    config = model.config
    inputs, loop_golden = _golden(model, function)
    with torch.no_grad():
        prompt, state = Embed(model)(*(torch.from_numpy(array) for array in inputs.values()))
        for _ in range(_GOLDEN_LOOPS):
            state = model.step(state, prompt)
    last = np.full((_GOLDEN_ROWS, 1), state.shape[1] - 1, np.int64)
    step_inputs = dict(zip(STEP_INPUTS, (state.numpy(), prompt.numpy(), last), strict=True))
    embed_golden = golden_of(Embed(model), inputs, EMBED_OUTPUTS)
    step_golden = golden_of(StepGraph(model), step_inputs, STEP_OUTPUTS)
    worst = worst_tolerance(embed_golden, "fp32")
    embed_file = f"{name}.embed.onnx"
    differences = {embed_file: largest_difference(embed, embed_golden, worst, f"{name} embed")}
    states = tuple(TensorSpec(key, "FP32", (-1, -1, config.dim)) for key in ("prompt", "state"))
    specs, profile = client_inputs(config)
    artifacts = [
        Artifact(
            file=embed_file, runtime="any", precision="fp32", opset=OPSET, role="embed", inputs=specs,
            tolerance=allowed_tolerance(embed_golden, "fp32", differences[embed_file]), outputs=states, profile=profile,
            golden=f"{name}.embed.golden.npz",
        )
    ]  # fmt: skip
    files = {
        f"{name}.golden.npz": loop_golden.encode(),
        f"{name}.embed.golden.npz": embed_golden.encode(),
        f"{name}.step.golden.npz": step_golden.encode(),
        embed_file: embed,
    }
    for step in steps:
        file = f"{name}.step.{step.runtime}.{step.precision}.onnx"
        files[file] = step.data
        worst = worst_tolerance(step_golden, step.precision)
        # The same tolerance holds for one step and for a whole loop.
        difference = max(
            largest_difference(step.data, step_golden, worst, file),
            _loop_difference(embed, step.data, loop_golden, worst, file),
        )
        differences[file] = difference
        artifacts.append(
            Artifact(
                file=file, runtime=step.runtime, precision=step.precision, opset=step.opset, role="step",
                tolerance=allowed_tolerance(step_golden, step.precision, difference),
                inputs=(*states, TensorSpec("last", "INT64", (-1, 1))),
                outputs=(TensorSpec(STEP_OUTPUTS[0], "FP32", (-1, -1, config.dim)), *numbers()),
                profile=_step_profile(config), golden=f"{name}.step.golden.npz",
            )
        )  # fmt: skip
    loops = float(_loop(embed, steps[0].data, inputs, TOLERANCE)["loops"].mean())
    tier = Tier(name=name, artifacts=tuple(artifacts), golden=f"{name}.golden.npz")
    return TierFiles(tier, files, differences, loops)


def _golden(model: PromptTransformer, function: str) -> tuple[dict[str, Array], Golden]:
    """Return golden prompts, and the outputs after :data:`MAX_LOOPS` loops, without a tolerance.

    Where a state does not settle, the rounding of two machines would grow with the loops.
    """
    config = model.config
    xs, ys = draw_prompts(function, 4 * _GOLDEN_ROWS, config.points, config.dims, generator_of(GOLDEN))
    path = trajectory(model, xs, ys[:, :-1], MAX_LOOPS)
    rows = np.sort(np.argsort(path.residuals[-1], kind="stable")[:_GOLDEN_ROWS])
    inputs = {"xs": xs.numpy()[rows], "ys": ys[:, :-1].numpy()[rows]}
    outputs = {
        "prediction": path.predictions[-1][rows, None],
        "residual": path.residuals[-1][rows, None],
        "loops": np.full((len(rows), 1), MAX_LOOPS, np.int32),
    }
    return inputs, Golden(inputs, outputs)


@torch.no_grad()
def calibration(model: PromptTransformer, function: str) -> list[Feeds]:
    """Return inputs of steps from all loops of some prompts, by loop; prompts have no padding."""
    config = model.config
    xs, ys = draw_prompts(function, _CALIBRATION_ROWS, config.points, config.dims, generator_of(CALIBRATION))
    prompt, state = Embed(model)(xs, ys[:, :-1])
    last = np.full((_CALIBRATION_ROWS, 1), state.shape[1] - 1, np.int64)
    feeds: list[Feeds] = []
    for _ in range(MAX_LOOPS):
        feeds.append(dict(zip(STEP_INPUTS, (state.numpy(), prompt.numpy(), last), strict=True)))
        state = model.step(state, prompt)
    return feeds


def _loop(
    embed: bytes, step: bytes, inputs: dict[str, Array], tolerance: float, rows: int = _JUDGED_ROWS
) -> dict[str, Array]:
    """Run the loops of some prompts, so many rows at once."""
    runners = [OnnxRuntimeRunner(data, subject="a graph of a loop") for data in (embed, step)]
    try:
        loop = Loop(PROGRAM, {FULL: LoopRunners(*runners)})
        options = Options(FULL, LoopLimits(MAX_LOOPS, tolerance))
        found = [
            loop.compute({name: array[begin : begin + rows] for name, array in inputs.items()}, options).outputs
            for begin in range(0, len(inputs["xs"]), rows)
        ]
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    finally:
        for runner in runners:
            runner.close()


def _loop_difference(embed: bytes, step: bytes, golden: Golden, tolerance: Tolerance, subject: str) -> float:
    outputs = _loop(embed, step, dict(golden.inputs), -1.0)
    return check_outputs(outputs, golden, tolerance, f"{subject}, {MAX_LOOPS} loops").max_abs_diff


def _step_profile(config: PromptConfig) -> dict[str, Profile]:
    tokens = _profile((3, config.dim), (2 * config.points - 1, config.dim))
    return {"state": tokens, "prompt": tokens, "last": _profile((1,), (1,))}


def _profile(least: tuple[int, ...], most: tuple[int, ...]) -> Profile:
    return Profile(min=(1, *least), opt=(8, *most), max=(MAX_BATCH_SIZE, *most))
