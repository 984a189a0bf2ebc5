"""The parts of a request whose latencies are predicted: a run of a file, or several in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge.bundles.fields import Role
from edge.bundles.golden import decode_npz
from edge.bundles.manifest import Artifact, Manifest, Tensors, Tier
from edge.bundles.programs import GenerateProgram, HeadProgram, LoopProgram
from edge.programs.backward_head import HeadLayer
from export.estimate.devices import Mode
from export.estimate.operations import work_of
from export.estimate.roofline import Prediction, predict, total
from export.estimate.sizes import check_batches, check_sizes, input_shapes

Shapes = Mapping[str, tuple[int, ...]]
#: Tokens in the cache of a decoder before the one that is computed.
USUAL_CACHE = 128


class RoleRun(NamedTuple):
    """A run of a role's file, so many times in a request."""

    role: Role
    shapes: Shapes
    times: float = 1


class RequestPart(NamedTuple):
    """What is predicted: all runs in turn.

    Attributes:
        name: empty for a model whose request is one run.
        tokens: of each row; None where the inputs have no dimension of tokens.
        whole: whether these are all runs of a request to a looped model.
    """

    name: str
    rows: int
    tokens: int | None
    runs: tuple[RoleRun, ...]
    whole: bool = False

    @property
    def key(self) -> tuple[str, int, int | None]:
        """What the same part of another tier has in common with it, which may need other numbers of loops."""
        return ("" if self.whole else self.name, self.rows, self.tokens)


def tier_files(tier: Tier, runtime: str, roles: Sequence[Role]) -> dict[Role, Artifact]:
    """Return a tier's file of each role for a runtime; none if one is missing."""
    files = {(one.runtime, one.role): one for one in tier.artifacts}
    by_role = {role: files.get((runtime, role)) or files.get(("any", role)) for role in roles}
    present = {role: one for role, one in by_role.items() if one}
    return present if len(present) == len(roles) else {}


def parts_of(
    manifest: Manifest,
    files: Mapping[Role, Artifact],
    read: Callable[[str], bytes],
    *,
    batches: Sequence[int],
    lengths: Sequence[int] = (),
    loops: float | None = None,
) -> list[RequestPart]:
    """Return the parts of a request to one tier.

    A model without a program, or a cascade's tier, has one run of each size; a looped model its embedding, a step, and
    where ``loops`` are known all runs of a request; a decoder its prompt, and a token behind 128 others; a head all of
    its layers.

    Args:
        files: of the tier, by role.
        read: returns the bytes of a bundle's file.
        lengths: tokens; empty for the usual ones, as far as the model takes them. A looped model has prompts of the
            length that it is tuned for.
        loops: of a request of a looped model.

    Raises:
        UsageError: the model does not take inputs of such a size.
    """
    check_batches(manifest.max_batch_size, batches)
    match manifest.program:
        case LoopProgram():
            return _of_loop({role: manifest.tensors(one) for role, one in files.items()}, batches, loops)
        case GenerateProgram() as program:
            blocks = {role: manifest.tensors(one) for role, one in files.items()}
            return _of_decoder(program, blocks, batches, lengths)
        case HeadProgram() as program:
            return _of_head(program, manifest, read, batches)
    tensors, most = manifest.tensors(files["model"]), manifest.max_batch_size
    return [
        RequestPart(
            "", rows, tokens, (RoleRun("model", input_shapes(tensors.inputs, tensors.profile, most, rows, tokens)),)
        )
        for rows, tokens in check_sizes(tensors.inputs, tensors.profile, most, lengths, batches)
    ]


class PartPrediction(NamedTuple):
    """A part of a request to a tier, and how many times as fast it is as the same part of the first tier."""

    tier: str
    part: RequestPart
    prediction: Prediction
    times_faster: float


def predict_tiers(
    manifest: Manifest,
    files: Mapping[str, Mapping[Role, Artifact]],
    read: Callable[[str], bytes],
    predict_run: Callable[[str, Role, Shapes], Prediction],
    *,
    batches: Sequence[int],
    lengths: Sequence[int] = (),
    loops: Mapping[str, float],
) -> list[PartPrediction]:
    """Predict all parts of a request to each tier, the first one of which all are compared with.

    Args:
        files: of each tier, by role.
        predict_run: predicts one run of a tier's file of a role.
        read, batches, lengths: see :func:`parts_of`.
        loops: of a request to each tier of a looped model.
    """
    first, predictions = dict[tuple[str, int, int | None], float](), []
    for tier, artifacts in files.items():
        for part in parts_of(manifest, artifacts, read, batches=batches, lengths=lengths, loops=loops.get(tier)):
            prediction = total([(run.times, predict_run(tier, run.role, run.shapes)) for run in part.runs])
            faster = first.setdefault(part.key, prediction.milliseconds) / prediction.milliseconds
            predictions.append(PartPrediction(tier, part, prediction, faster))
    return predictions


def predict_file(model: bytes, shapes: Shapes, mode: Mode, subject: str) -> Prediction:
    """Predict a run of an ONNX file for TensorRT, with the kernels of the graph's structure: no engine is built.

    Raises:
        BundleError: as :func:`export.estimate.operations.work_of`.
    """
    return predict(work_of(model, shapes, subject), None, mode)


def _of_loop(files: Mapping[Role, Tensors], batches: Sequence[int], loops: float | None) -> list[RequestPart]:
    tokens = next(iter(files["step"].profile.values())).opt[1]
    parts = []
    for rows in batches:
        runs = [
            RoleRun(role, {name: (rows, *one.opt[1:]) for name, one in file.profile.items()})
            for role, file in files.items()
        ]
        parts += [RequestPart(run.role, rows, tokens, (run,)) for run in runs]
        if loops is not None:
            counted = (run if run.role == "embed" else run._replace(times=loops) for run in runs)
            parts.append(RequestPart(f"{loops:.3g} loops", rows, tokens, tuple(counted), whole=True))
    return parts


def _of_decoder(
    program: GenerateProgram, blocks: Mapping[Role, Tensors], batches: Sequence[int], lengths: Sequence[int]
) -> list[RequestPart]:
    first = blocks[program.roles[0]]
    prompt = [spec for spec in first.inputs if spec.name == program.tokens]
    most = max(profile[program.cache[0].past].max[2] for profile in first.profiles)
    cached = min(USUAL_CACHE, most)
    prompts = check_sizes(prompt, first.profile, max(batches), lengths, batches)
    sizes = [("prefill", rows, tokens, 1) for rows, tokens in prompts]
    sizes += [(f"decode, {cached} cached", rows, 1, cached) for rows in batches]
    return [
        RequestPart(
            name,
            rows,
            tokens,
            tuple(RoleRun(role, _of_cache(program, file, rows, tokens or 1, places)) for role, file in blocks.items()),
        )
        for name, rows, tokens, places in sizes
    ]


def _of_cache(program: GenerateProgram, file: Tensors, rows: int, tokens: int, cached: int) -> Shapes:
    free = dict.fromkeys((program.tokens, *program.hidden), tokens)
    return {
        spec.name: (rows, *(free.get(spec.name, cached) if size == -1 else size for size in spec.shape[1:]))
        for spec in file.inputs
    }


def _of_head(
    program: HeadProgram, manifest: Manifest, read: Callable[[str], bytes], batches: Sequence[int]
) -> list[RequestPart]:
    arrays = decode_npz(read(program.tensors), program.tensors)
    names = (program.keys, program.values, program.temperatures)
    layers = [
        {name: arrays[f"{layer}/{field}"].shape for name, field in zip(names, HeadLayer._fields, strict=True)}
        for layer in range(program.layers)
    ]
    return [
        RequestPart("head", rows, None, tuple(RoleRun("head", inputs | layer) for layer in layers))
        for rows in batches
        for inputs in [{spec.name: (rows, *spec.shape[1:]) for spec in manifest.inputs}]
    ]
