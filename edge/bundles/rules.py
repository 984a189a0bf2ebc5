"""The rules of a manifest that span fields. Programs and preprocess steps check rules of their own."""

from __future__ import annotations

from itertools import chain

from edge.bundles.fields import Role, require
from edge.bundles.latency import check_latency
from edge.bundles.manifest import MANIFEST_NAME, Artifact, Manifest, Tensors, Tier
from edge.bundles.program_rules import check_program
from edge.bundles.steps import ScorePostprocess
from edge.datatypes import NUMPY_TYPES, TensorSpec
from edge.errors import Raw


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
            check_latency(latency, manifest.roles == ("model",), f"{subject} tier {tier.name!r}")
    _check_preprocess(manifest, subject)
    _check_postprocess(manifest, subject)
    check_program(manifest, subject)
    _check_serving(manifest, subject)


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
    if role != "backbone":
        return tensors
    reads, gives = (
        tuple(TensorSpec(spec.name, "FP32" if spec.datatype == "FP16" else spec.datatype, spec.shape) for spec in specs)
        for specs in (tensors.inputs, tensors.outputs)
    )
    return tensors._replace(inputs=reads, outputs=gives)


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
    step = manifest.postprocess
    if step is None:
        return
    logits = next((spec for spec in manifest.outputs if spec.name == step.logits), None)
    holds = logits is not None and logits.datatype == "FP32" and logits.shape == step.shape
    each = "the score" if isinstance(step, ScorePostprocess) else "a column for each label"
    expected = f"an FP32 output of shape {list(step.shape)}, {each}"
    require(holds, subject, "postprocess logits", step.logits, expected)
    _check_new_name(manifest, step.output, "postprocess output", subject)


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
