"""The rules of a manifest's program: its names, tensors and limits must fit the rest of the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from edge.bundles.fields import require
from edge.bundles.manifest import Manifest, TokenizerPreprocess
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
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
    """Raise a BundleError if the tiers are not two of the bundle's, or ``logits`` is not an output with labels."""
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
    """Raise a BundleError if the tensors of the files do not fit together, or the budget exceeds its limit."""
    column = (-1, 1)
    outputs = {spec.name: (spec.datatype, spec.shape) for spec in manifest.outputs}
    expected = {
        program.prediction: ("FP32", column),
        program.residual: ("FP32", column),
        program.loops: ("INT32", column),
    }
    require(outputs == expected, subject, "loop outputs", sorted(outputs), f"{expected}")
    require(manifest.max_batch_size, subject, "loop max_batch_size", 0, "a model with batches")
    expected_loops = f"at most most_loops ({program.most_loops})"
    require(program.max_loops <= program.most_loops, subject, "loop max_loops", program.max_loops, expected_loops)
    for tier in manifest.tiers:
        files = {artifact.role: manifest.tensors(artifact) for artifact in tier.artifacts}
        embed = {spec.name: spec for spec in files["embed"].outputs}
        reads, gives = ({spec.name: spec for spec in specs} for specs in files["step"][:2])
        field = f"loop files of tier {tier.name!r}"
        given, wanted = sorted(embed), f"{program.state!r} and {program.prompt!r}, as the step reads them"
        holds = embed == {name: reads.get(name) for name in (program.state, program.prompt)}
        require(holds and files["embed"].inputs == manifest.inputs, subject, field, given, wanted)
        given, wanted = sorted(reads), f"{program.state!r}, {program.prompt!r} and {program.last!r}"
        require(reads.keys() == {program.state, program.prompt, program.last}, subject, field, given, wanted)
        given, wanted = sorted(gives), f"{program.next_state!r}, {program.prediction!r} and {program.residual!r}"
        require(
            gives.keys() == {program.next_state, program.prediction, program.residual}, subject, field, given, wanted
        )
    named = (program.points, program.values)
    sequences = {spec.name for spec in manifest.inputs if len(spec.shape) > 1}
    holds = named == (None, None) or (set(named) <= sequences and program.points != program.values)
    require(holds, subject, "loop points and values", named, f"two of {sorted(sequences)}, or neither")


def _check_generate(program: GenerateProgram, manifest: Manifest, subject: str) -> None:
    """Raise a BundleError if the tensors of the file, or those of the tokenizer, do not fit the program."""
    outputs = {spec.name: (spec.datatype, spec.shape) for spec in manifest.outputs}
    expected = {program.text: ("BYTES", (-1, 1)), program.generated: ("INT32", (-1, 1))}
    holds = outputs == expected and len(expected) == 2
    require(holds, subject, "generate outputs", sorted(outputs), f"{expected}")
    holds = not {LOGPROBS, TOKEN_IDS} & {*outputs}
    require(holds, subject, "generate outputs", sorted(outputs), f"other names than {LOGPROBS!r} and {TOKEN_IDS!r}")
    require(manifest.max_batch_size, subject, "generate max_batch_size", 0, "a model with batches")
    step = manifest.preprocess
    names = {spec.name for spec in manifest.inputs}
    holds = isinstance(step, TokenizerPreprocess) and names == set(step.outputs) and len(names) == 2
    expected_step = "a tokenizer for the manifest's inputs, ids and mask"
    made = sorted(step.outputs) if step else Raw("none")
    require(holds, subject, "generate preprocess", made, expected_step)
    less = f"less than positions ({program.positions})"
    require(program.max_tokens < program.positions, subject, "generate max_tokens", program.max_tokens, less)
    assert isinstance(step, TokenizerPreprocess)
    require(step.max_length < program.positions, subject, "preprocess max_length", step.max_length, less)
    names_of_cache = [name for one in program.cache for name in (one.past, one.new)]
    holds = len(set(names_of_cache)) == len(names_of_cache)
    require(holds, subject, "generate cache", sorted(names_of_cache), "each name once")
    column = ("INT64", (-1, 1))
    for tier, artifact in ((one, artifact) for one in manifest.tiers for artifact in one.artifacts):
        file = manifest.tensors(artifact)
        reads, gives = ({spec.name: spec for spec in specs} for specs in file[:2])
        field = f"generate files of tier {tier.name!r}"
        wanted = {program.tokens, program.lengths, program.last, *(one.past for one in program.cache)}
        require(reads.keys() == wanted, subject, field, sorted(reads), f"the inputs {sorted(wanted)}")
        wanted = {program.logits, *(one.new for one in program.cache)}
        require(gives.keys() == wanted, subject, field, sorted(gives), f"the outputs {sorted(wanted)}")
        for name, kind in ((program.tokens, ("INT64", (-1, -1))), (program.lengths, column), (program.last, column)):
            given = reads[name].datatype, reads[name].shape
            require(given == kind, subject, f"{field}, input {name!r}", given, f"{kind}")
        given = gives[program.logits].datatype, gives[program.logits].shape
        vocabulary = given[1][-1]
        holds = given == ("FP32", (-1, vocabulary)) and vocabulary > 0
        require(holds, subject, f"{field}, output {program.logits!r}", given, "FP32 [-1, vocabulary]")
        last = max(program.end_tokens, default=0)
        require(last < vocabulary, subject, "generate end_tokens", last, f"less than the vocabulary ({vocabulary})")
        for one in program.cache:
            given = reads[one.past].datatype, reads[one.past].shape
            holds = given == (gives[one.new].datatype, gives[one.new].shape) and given[0] in ("FP32", "FP16")
            holds = holds and [size > 0 for size in given[1]] == [False, True, False, True]
            expected_cache = f"FP32 or FP16 [-1, heads, -1, width], as {one.new!r}"
            require(holds, subject, f"{field}, input {one.past!r}", given, expected_cache)


def _check_head(program: HeadProgram, manifest: Manifest, subject: str) -> None:
    """Raise a BundleError if the tensors of the file, or those of the manifest, do not fit the program."""
    inputs = {spec.name: (spec.datatype, len(spec.shape)) for spec in manifest.inputs}
    expected = {program.logits: ("FP32", 2), program.alpha: ("FP32", 2)}
    require(inputs == expected, subject, "head inputs", sorted(inputs), f"{expected}")
    outputs = [(spec.name, spec.datatype, spec.shape) for spec in manifest.outputs]
    logits = next(spec.shape for spec in manifest.inputs if spec.name == program.logits)
    expected_output = [(program.moved, "FP32", logits)]
    require(outputs == expected_output, subject, "head outputs", outputs, f"{expected_output}")
    require(manifest.max_batch_size, subject, "head max_batch_size", 0, "a model with batches")
    field, given, wanted_file = f"files entry for {program.tensors!r}", Raw("nothing"), "the tensors of the head"
    require(program.tensors in manifest.files, subject, field, given, wanted_file)
    for tier in manifest.tiers:
        reads, gives = ({spec.name for spec in specs} for specs in manifest.tensors(tier.artifacts[0])[:2])
        wanted = {program.logits, program.alpha, program.keys, program.values, program.temperatures}
        field = f"head file of tier {tier.name!r}"
        require(reads == wanted, subject, field, sorted(reads), f"the inputs {sorted(wanted)}")
        require(gives == {program.moved}, subject, field, sorted(gives), f"the output {program.moved!r}")


_RULES: Final[Mapping[type, Callable[[Any, Manifest, str], None]]] = {
    CascadeProgram: _check_cascade,
    LoopProgram: _check_loop,
    GenerateProgram: _check_generate,
    HeadProgram: _check_head,
}
