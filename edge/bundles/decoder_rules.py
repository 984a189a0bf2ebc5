"""The rules of a decoder's files, which are its blocks; a decoder in one file has one block."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from msgspec.structs import astuple

from edge.bundles.fields import require
from edge.bundles.manifest import Artifact, Manifest, Tensors, Tier
from edge.bundles.programs import CacheTensor, GenerateProgram

#: Datatype and shape.
_Kind = tuple[str, tuple[int, ...]]


def check_decoder(program: GenerateProgram, manifest: Manifest, tier: Tier, subject: str) -> None:
    """Raise a BundleError with the field's name for the first rule that the files of a tier break."""
    field, roles = f"generate files of tier {tier.name!r}", program.roles
    reads = {one.role: {spec.name for spec in manifest.tensors(one).inputs} for one in tier.artifacts}
    caches = [[pair for pair in program.cache if pair.past in reads[role]] for role in roles]
    given, names = [[pair.past for pair in part] for part in caches], [pair.past for pair in program.cache]
    holds = all(given) and [*chain(*given)] == names
    require(holds, subject, f"{field}, caches of the blocks", given, f"parts of {names}, in this order")
    states: dict[str, _Kind] = {}
    first = tier.artifacts[0]
    for artifact in tier.artifacts:
        require(artifact.role in roles, subject, f"{field}, role", artifact.role, f"one of {list(roles)}")
        block = roles.index(artifact.role)
        _check_block(program, manifest.tensors(artifact), block, caches[block], states, subject, field)
        sizes, expected = (_sizes(program, manifest, one, caches) for one in (artifact, first))
        as_first = f"{expected}, as {first.file!r} has them"
        require(sizes == expected, subject, f"{field}, rows, tokens and places", sizes, as_first)


def _check_block(
    program: GenerateProgram,
    tensors: Tensors,
    block: int,
    cache: list[CacheTensor],
    states: dict[str, _Kind],
    subject: str,
    field: str,
) -> None:
    """Check one block; ``states`` has the datatypes and shapes of states that others read or give, and gets its own."""
    reads, gives = _ends(program, block)
    columns = {program.lengths: (-1, 1)} | ({program.tokens: (-1, -1)} if reads == program.tokens else {})
    columns |= {program.last: (-1, 1)} if gives == program.logits else {}
    inputs, outputs = {*columns, reads, *(pair.past for pair in cache)}, {gives, *(pair.new for pair in cache)}
    require_names(tensors, inputs, outputs, subject, field)
    kind = {spec.name: (spec.datatype, spec.shape) for spec in (*tensors.inputs, *tensors.outputs)}
    for name, sizes in columns.items():
        expected = f"{('INT64', sizes)}"
        require(kind[name] == ("INT64", sizes), subject, f"{field}, input {name!r}", kind[name], expected)
    for name in (one for one in (reads, gives) if one in program.hidden):
        width = kind[name][1][-1]
        holds = kind[name] == states.setdefault(name, ("FP32", (-1, -1, width))) and width > 0
        expected = "FP32 [-1, -1, width], as the other block has it"
        require(holds, subject, f"{field}, states {name!r}", kind[name], expected)
    if gives == program.logits:
        logits = kind[gives]
        vocabulary = logits[1][-1]
        holds = logits == ("FP32", (-1, vocabulary)) and vocabulary > 0
        require(holds, subject, f"{field}, output {gives!r}", logits, "FP32 [-1, vocabulary]")
        last = max(program.end_tokens, default=0)
        require(last < vocabulary, subject, "generate end_tokens", last, f"less than the vocabulary ({vocabulary})")
    for pair in cache:
        datatype, shape = found = kind[pair.past]
        holds = found == kind[pair.new] and datatype in ("FP32", "FP16")
        holds = holds and [size > 0 for size in shape] == [False, True, False, True]
        expected = f"FP32 or FP16 [-1, heads, -1, width], as {pair.new!r}"
        require(holds, subject, f"{field}, input {pair.past!r}", found, expected)


def _ends(program: GenerateProgram, block: int) -> tuple[str, str]:
    """Return what a block reads beside lengths and cache, and what it computes beside new entries of the cache."""
    return (program.tokens, *program.hidden)[block], (*program.hidden, program.logits)[block]


def _sizes(
    program: GenerateProgram, manifest: Manifest, artifact: Artifact, caches: list[list[CacheTensor]]
) -> list[list[tuple[int, ...]]]:
    """Return rows, tokens and places at least, at best and at most, of each set of profiles."""
    block = program.roles.index(artifact.role)
    names = _ends(program, block)[0], caches[block][0].past
    return [
        [(*sequence[:2], past[2]) for sequence, past in zip(*(astuple(profile[name]) for name in names), strict=True)]
        for profile in manifest.tensors(artifact).profiles
    ]


def require_names(
    tensors: Tensors, inputs: Collection[str], outputs: Collection[str], subject: str, field: str
) -> None:
    """Raise a BundleError unless a file has just these inputs and outputs."""
    for kind, specs, names in (("inputs", tensors.inputs, inputs), ("outputs", tensors.outputs, outputs)):
        given = sorted(spec.name for spec in specs)
        require(given == sorted(names), subject, field, given, f"the {kind} {sorted(names)}")
