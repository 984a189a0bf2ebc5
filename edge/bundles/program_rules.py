"""The rules of a manifest's program: its names, tensors and limits must fit the rest of the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from edge.bundles.fields import require
from edge.bundles.manifest import Manifest, Tensors
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.errors import Raw
from edge.protocol import LOGPROBS, TOKEN_IDS


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
        _require_names(files["step"], (program.state, program.prompt, program.last), outputs, subject, field)
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
    past, new = [pair.past for pair in program.cache], [pair.new for pair in program.cache]
    require(len({*past, *new}) == 2 * len(past), subject, "generate cache", sorted(past + new), "each name once")
    column = ("INT64", (-1, 1))
    columns = {program.tokens: ("INT64", (-1, -1)), program.lengths: column, program.last: column}
    for name, artifact in ((tier.name, artifact) for tier in manifest.tiers for artifact in tier.artifacts):
        tensors, field = manifest.tensors(artifact), f"generate files of tier {name!r}"
        _require_names(tensors, (*columns, *past), (program.logits, *new), subject, field)
        kind = {spec.name: (spec.datatype, spec.shape) for spec in (*tensors.inputs, *tensors.outputs)}
        for column_name, expected in columns.items():
            given = kind[column_name]
            require(given == expected, subject, f"{field}, input {column_name!r}", given, f"{expected}")
        logits = kind[program.logits]
        vocabulary = logits[1][-1]
        holds = logits == ("FP32", (-1, vocabulary)) and vocabulary > 0
        require(holds, subject, f"{field}, output {program.logits!r}", logits, "FP32 [-1, vocabulary]")
        last = max(program.end_tokens, default=0)
        require(last < vocabulary, subject, "generate end_tokens", last, f"less than the vocabulary ({vocabulary})")
        for pair in program.cache:
            datatype, shape = cache = kind[pair.past]
            holds = cache == kind[pair.new] and datatype in ("FP32", "FP16")
            holds = holds and [size > 0 for size in shape] == [False, True, False, True]
            expected_cache = f"FP32 or FP16 [-1, heads, -1, width], as {pair.new!r}"
            require(holds, subject, f"{field}, input {pair.past!r}", cache, expected_cache)


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
        _require_names(manifest.tensors(tier.artifacts[0]), reads, (program.moved,), subject, field)


def _require_outputs(
    manifest: Manifest, kinds: Sequence[tuple[str, tuple[str, tuple[int, ...]]]], subject: str
) -> None:
    """Raise a BundleError unless a manifest with batches has just these outputs."""
    outputs = sorted((spec.name, (spec.datatype, spec.shape)) for spec in manifest.outputs)
    require(outputs == sorted(kinds), subject, "outputs", [name for name, _ in outputs], f"{dict(kinds)}")
    require(manifest.max_batch_size, subject, "max_batch_size", 0, "a model with batches")


def _require_names(tensors: Tensors, inputs: Sequence[str], outputs: Sequence[str], subject: str, field: str) -> None:
    """Raise a BundleError unless a file has just these inputs and outputs."""
    for kind, specs, names in (("inputs", tensors.inputs, inputs), ("outputs", tensors.outputs, outputs)):
        given = sorted(spec.name for spec in specs)
        require(given == sorted(names), subject, field, given, f"the {kind} {sorted(names)}")


_RULES: Final[Mapping[type, Callable[[Any, Manifest, str], None]]] = {
    CascadeProgram: _check_cascade,
    LoopProgram: _check_loop,
    GenerateProgram: _check_generate,
    HeadProgram: _check_head,
}
