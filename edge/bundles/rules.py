"""The rules of a manifest that span fields, and those of its program. Preprocess steps check rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from edge.bundles.decoder_rules import check_decoder, require_names
from edge.bundles.fields import Role, require
from edge.bundles.manifest import MANIFEST_NAME, Artifact, Latency, Manifest, PredictedLatency, Tensors, Tier
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.bundles.steps import (
    BoxPostprocess,
    ImagePreprocess,
    ScorePostprocess,
    SpanPostprocess,
    TokenizerPreprocess,
)
from edge.datatypes import NUMPY_TYPES, TensorSpec
from edge.errors import Raw
from edge.protocol import LOGPROBS, TOKEN_IDS


def check(manifest: Manifest, subject: str) -> None:
    """Check the rules that span fields; raise a BundleError with the field's name for the first that is broken."""
    _check_tensors(Tensors(manifest.inputs, manifest.outputs, manifest.profile), manifest.max_batch_size, subject)
    _unique(subject, "tier name", [tier.name for tier in manifest.tiers])
    artifacts = [artifact for tier in manifest.tiers for artifact in tier.artifacts]
    parts = [*(tier.golden for tier in manifest.tiers), *(artifact.golden for artifact in artifacts)]
    goldens = sorted({manifest.golden, *filter(None, parts)})
    files = [*(artifact.file for artifact in artifacts), *goldens]
    for name in files:
        field, expected = f"files entry for {name!r}", "its size_bytes and sha256"
        require(name in manifest.files, subject, field, Raw("nothing"), expected)
    _unique(subject, "file of an artifact or of the golden set", files)
    expected = "every other file, because a manifest cannot hash itself"
    require(MANIFEST_NAME not in manifest.files, subject, "files", MANIFEST_NAME, expected)
    for artifact in artifacts:
        _check_own_tensors(manifest, artifact, subject)
        outputs = [spec.name for spec in manifest.tensors(artifact).outputs]
        field, expected = f"tolerance of artifact {artifact.file!r}", f"outputs among {outputs}"
        require(
            set(artifact.tolerance.outputs) <= set(outputs), subject, field, [*artifact.tolerance.outputs], expected
        )
    for tier in manifest.tiers:
        _check_roles(manifest, tier, subject)
        for latency in tier.latencies:
            _check_latency(latency, manifest.roles == ("model",), f"{subject} tier {tier.name!r}")
    _check_space(manifest, subject)
    _check_preprocess(manifest, subject)
    _check_postprocess(manifest, subject)
    check_program(manifest, subject)
    _check_serving(manifest, subject)


def _check_space(manifest: Manifest, subject: str) -> None:
    spaces = sorted({tier.space for tier in manifest.tiers if tier.space})
    expected = "one for all tiers that state any, because a policy may choose each of them"
    require(len(spaces) < 2, subject, "space of the tiers", spaces, expected)
    first, is_single = manifest.outputs[0], len(manifest.outputs) == 1
    is_vector = is_single and first.datatype == "FP32" and len(first.shape) == 2 and first.shape[1] > 0
    holds = is_vector and manifest.program is None and manifest.postprocess is None
    expected = "none, or an embedding as the only output: FP32 of shape [-1, width], without program and postprocess"
    require(holds or not spaces, subject, "space of the tiers", "".join(spaces), expected)


def _check_tensors(tensors: Tensors, max_batch_size: int, subject: str) -> None:
    specs = (*tensors.inputs, *tensors.outputs)
    for spec in specs:
        expected = f"one of {', '.join(NUMPY_TYPES)}"
        require(spec.datatype in NUMPY_TYPES, subject, f"datatype of {spec.name!r}", spec.datatype, expected)
        holds = not max_batch_size or spec.shape[0] == -1
        require(holds, subject, f"shape of {spec.name!r}", spec.shape, "-1 first, because max_batch_size is not 0")
    _unique(subject, "tensor name", [spec.name for spec in specs])
    dynamic = {spec.name: spec for spec in tensors.inputs if -1 in spec.shape}
    expected = f"exactly the inputs with a -1 dimension: {sorted(dynamic)}"
    for profiles in (tensors.profile, *tensors.more_profiles):
        require(set(profiles) == set(dynamic), subject, "profile", sorted(profiles), expected)
    for name, profile in chain(*(profiles.items() for profiles in tensors.profiles)):
        field, shapes = f"profile of {name!r}", (profile.min, profile.opt, profile.max)
        for shape in shapes:
            require(dynamic[name].accepts(shape), subject, field, shape, f"a shape that fits {dynamic[name].shape}")
        holds = all(a <= b <= c for a, b, c in zip(*shapes, strict=True))
        require(holds, subject, field, shapes, "min <= opt <= max in every dimension")
        expected = f"the first dimension of max to be max_batch_size ({max_batch_size})"
        require(not max_batch_size or profile.max[0] == max_batch_size, subject, field, profile.max, expected)


def _check_own_tensors(manifest: Manifest, artifact: Artifact, subject: str) -> None:
    stated = [name for name in ("inputs", "outputs", "profile", "more_profiles") if getattr(artifact, name)]
    subject = f"{subject} artifact {artifact.file!r}"
    if not stated:
        return
    given, expected = Raw(f"{stated[0]} of its own"), "the manifest's tensors, because clients send those"
    require(artifact.role != "model", subject, "role 'model'", given, expected)
    expected = "none, because its inputs are the manifest's"
    profiles = (artifact.profile, *artifact.more_profiles)
    require(artifact.inputs or not any(profiles), subject, "profile", sorted(set().union(*profiles)), expected)
    _check_tensors(manifest.tensors(artifact), manifest.batch_size(artifact), subject)


def _check_roles(manifest: Manifest, tier: Tier, subject: str) -> None:
    subject = f"{subject} tier {tier.name!r}"
    _unique(subject, "artifact", [f"{artifact.role} for {artifact.runtime}" for artifact in tier.artifacts])
    first = {artifact.role: artifact for artifact in reversed(tier.artifacts)}
    for role in manifest.program.roles if manifest.program else ("model",):
        require(role in first, subject, "roles of the artifacts", sorted(first), f"{role!r} among them")
    for artifact in tier.artifacts:
        other = first[artifact.role]
        holds = _alike(manifest.tensors(artifact), artifact.role) == _alike(manifest.tensors(other), other.role)
        given, expected = Raw("tensors of its own"), f"the tensors of {other.file!r}, which has the same role"
        require(holds, subject, f"artifact {artifact.file!r}", given, expected)


def _alike(tensors: Tensors, role: Role) -> Tensors:
    """Return tensors as files for other runtimes have them: of a decoder in FP16, those of one in FP32."""
    if not role.startswith("backbone"):
        return tensors
    reads, gives = (
        tuple(TensorSpec(spec.name, "FP32" if spec.datatype == "FP16" else spec.datatype, spec.shape) for spec in specs)
        for specs in (tensors.inputs, tensors.outputs)
    )
    return tensors._replace(inputs=reads, outputs=gives)


def _check_latency(latency: Latency, one_run: bool, subject: str) -> None:
    # A request of one run has no parts.
    if isinstance(latency, PredictedLatency):
        given = (latency.low_ms, latency.milliseconds, latency.high_ms)
        require(given == tuple(sorted(given)), subject, "prediction", given, "low_ms <= milliseconds <= high_ms")
    part = Raw("none") if latency.part is None else latency.part
    expected = "none, because a request is one run" if one_run else "the part of a request, which has several"
    require((latency.part is None) == one_run, subject, "latency part", part, expected)


def _check_preprocess(manifest: Manifest, subject: str) -> None:
    step = manifest.preprocess
    if step is None:
        return
    inputs = [spec.name for spec in manifest.inputs]
    for name in step.graph_inputs:
        require(name in inputs, subject, "preprocess output", name, f"one of {inputs}")
    given, expected = Raw("max_batch_size 0"), "a model with batches, so that two texts have as many rows"
    require(len(step.inputs) == 1 or manifest.max_batch_size, subject, "preprocess pair", given, expected)
    _unique(subject, "preprocess output", list(step.graph_inputs))
    _unique(subject, "preprocess input", [text.name for text in step.inputs])
    for text in step.inputs:
        _check_new_name(manifest, text.name, "preprocess input", subject)
    step.check(manifest.inputs, manifest.files, subject)


def _check_postprocess(manifest: Manifest, subject: str) -> None:
    before, step = manifest.preprocess, manifest.postprocess
    is_span = isinstance(step, SpanPostprocess)
    has_windows = isinstance(before, TokenizerPreprocess) and before.windows is not None
    expected = "a tokenizer with windows before a span, and none elsewhere"
    require(has_windows == is_span, subject, "preprocess", Raw("another step"), expected)
    expected = "1 or more, for the windows of a text"
    require(manifest.max_batch_size or not is_span, subject, "max_batch_size", manifest.max_batch_size, expected)
    if step is None:
        return
    for result in step.results:
        _check_new_name(manifest, result.name, "postprocess output", subject)
    _unique(subject, "postprocess output", [result.name for result in step.results])
    if isinstance(step, BoxPostprocess):
        holds, expected = isinstance(before, ImagePreprocess), "an image before boxes"
        require(holds, subject, "preprocess", Raw("another step"), expected)
        step.check(manifest.outputs, subject)
        return
    each = "a token" if is_span else "the score" if isinstance(step, ScorePostprocess) else "a column for each label"
    expected = f"an FP32 output of shape {list(step.shape)}, {each}"
    for name in step.reads:
        logits = next((spec for spec in manifest.outputs if spec.name == name), None)
        holds = logits is not None and logits.datatype == "FP32" and logits.shape == step.shape
        require(holds, subject, "postprocess logits", name, expected)


def _check_new_name(manifest: Manifest, name: str, field: str, subject: str) -> None:
    holds = all(name != spec.name for spec in (*manifest.inputs, *manifest.outputs))
    require(holds, subject, field, name, "a name that no tensor of the graph has")


def _check_serving(manifest: Manifest, subject: str) -> None:
    step = manifest.serving
    if step is None:
        return
    expected = "another one, because there is no program"
    require(step.policy != "router" or manifest.program, subject, "serving policy", step.policy, expected)
    sizes, limit = step.preferred_batch_sizes, manifest.max_batch_size
    expected = f"at most max_batch_size ({limit})"
    require(all(size <= limit for size in sizes), subject, "serving preferred_batch_sizes", sizes, expected)


def _unique(subject: str, field: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, subject, field, "".join(twice[:1]), "each name once")


def check_program(manifest: Manifest, subject: str) -> None:
    """Raise a BundleError with the field's name for the first rule that the program breaks."""
    if not manifest.program:
        return
    _RULES[type(manifest.program)](manifest.program, manifest, subject)
    for artifact in (artifact for tier in manifest.tiers for artifact in tier.artifacts):
        # Files of the role "model" have the manifest's tensors, and so its golden set.
        holds = artifact.golden or "model" in manifest.program.roles
        field, none = f"golden of artifact {artifact.file!r}", Raw("none")
        require(holds, subject, field, none, "a golden set for its own tensors")


def _check_cascade(program: CascadeProgram, manifest: Manifest, subject: str) -> None:
    tiers, outputs = [tier.name for tier in manifest.tiers], manifest.outputs
    holds = program.lean in tiers and program.full in tiers and program.lean != program.full and "auto" not in tiers
    expected = f"two of {tiers}, none of which is called auto"
    require(holds, subject, "cascade tiers", (program.lean, program.full), expected)
    logits = next((spec for spec in outputs if spec.name == program.logits), None)
    has_batch = manifest.max_batch_size and all(spec.shape[0] == -1 for spec in outputs)
    # One column, a regression's, has no second label to be close to.
    has_labels = logits and logits.datatype == "FP32" and len(logits.shape) == 2 and logits.shape[1] != 1
    expected = "an FP32 output of shape [-1, labels], 2 labels or more, of a model with batches"
    require(has_labels and has_batch, subject, "cascade logits", program.logits, expected)


def _check_loop(program: LoopProgram, manifest: Manifest, subject: str) -> None:
    column = (-1, 1)
    floats = [(name, ("FP32", column)) for name in (program.prediction, program.residual)]
    _require_outputs(manifest, [*floats, (program.loops, ("INT32", column))], f"{subject} loop")
    expected_loops = f"at most most_loops ({program.most_loops})"
    require(program.max_loops <= program.most_loops, subject, "loop max_loops", program.max_loops, expected_loops)
    for tier in manifest.tiers:
        files = {artifact.role: manifest.tensors(artifact) for artifact in tier.artifacts}
        field = f"loop files of tier {tier.name!r}"
        embed = {spec.name: spec for spec in files["embed"].outputs}
        step = {spec.name: spec for spec in files["step"].inputs}
        holds = embed == {name: step.get(name) for name in (program.state, program.prompt)}
        expected = f"{program.state!r} and {program.prompt!r}, as the step reads them"
        require(holds and files["embed"].inputs == manifest.inputs, subject, field, sorted(embed), expected)
        outputs = (program.next_state, program.prediction, program.residual)
        require_names(files["step"], (program.state, program.prompt, program.last), outputs, subject, field)
    named = (program.points, program.values)
    sequences = {spec.name for spec in manifest.inputs if len(spec.shape) > 1}
    holds = named == (None, None) or (set(named) <= sequences and program.points != program.values)
    require(holds, subject, "loop points and values", named, f"two of {sorted(sequences)}, or neither")


def _check_generate(program: GenerateProgram, manifest: Manifest, subject: str) -> None:
    kinds = [(program.text, ("BYTES", (-1, 1))), (program.generated, ("INT32", (-1, 1)))]
    _require_outputs(manifest, kinds, f"{subject} generate")
    names = sorted(dict(kinds))
    expected_names = f"other names than {LOGPROBS!r} and {TOKEN_IDS!r}"
    require(not {LOGPROBS, TOKEN_IDS} & {*names}, subject, "generate outputs", names, expected_names)
    step = manifest.preprocess
    inputs = {spec.name for spec in manifest.inputs}
    holds = isinstance(step, TokenizerPreprocess) and inputs == set(step.graph_inputs) and len(inputs) == 2
    step_outputs = sorted(step.graph_inputs) if step else Raw("none")
    require(holds, subject, "generate preprocess", step_outputs, "a tokenizer for the manifest's inputs, ids and mask")
    less = f"less than positions ({program.positions})"
    require(program.max_tokens < program.positions, subject, "generate max_tokens", program.max_tokens, less)
    assert isinstance(step, TokenizerPreprocess)
    require(step.max_length < program.positions, subject, "preprocess max_length", step.max_length, less)
    cache = [name for pair in program.cache for name in (pair.past, pair.new)]
    others = [program.tokens, program.lengths, program.last, program.logits]
    _unique(subject, "generate tensor", [*cache, *program.hidden, *others])
    for tier in manifest.tiers:
        check_decoder(program, manifest, tier, subject)


def _check_head(program: HeadProgram, manifest: Manifest, subject: str) -> None:
    inputs = {spec.name: (spec.datatype, len(spec.shape)) for spec in manifest.inputs}
    expected = {program.logits: ("FP32", 2), program.alpha: ("FP32", 2)}
    require(inputs == expected, subject, "head inputs", sorted(inputs), f"{expected}")
    logits = next(spec.shape for spec in manifest.inputs if spec.name == program.logits)
    _require_outputs(manifest, [(program.moved, ("FP32", logits))], f"{subject} head")
    field, given, expected_file = f"files entry for {program.tensors!r}", Raw("nothing"), "the head's tensors"
    require(program.tensors in manifest.files, subject, field, given, expected_file)
    reads = (program.logits, program.alpha, program.keys, program.values, program.temperatures)
    for tier in manifest.tiers:
        field = f"head file of tier {tier.name!r}"
        require_names(manifest.tensors(tier.artifacts[0]), reads, (program.moved,), subject, field)


def _require_outputs(
    manifest: Manifest, kinds: Sequence[tuple[str, tuple[str, tuple[int, ...]]]], subject: str
) -> None:
    """Raise a BundleError unless a manifest with batches has just these outputs."""
    outputs = sorted((spec.name, (spec.datatype, spec.shape)) for spec in manifest.outputs)
    require(outputs == sorted(kinds), subject, "outputs", [name for name, _ in outputs], f"{dict(kinds)}")
    require(manifest.max_batch_size, subject, "max_batch_size", 0, "a model with batches")


_RULES: Final[Mapping[type, Callable[[Any, Manifest, str], None]]] = {
    CascadeProgram: _check_cascade,
    LoopProgram: _check_loop,
    GenerateProgram: _check_generate,
    HeadProgram: _check_head,
}
