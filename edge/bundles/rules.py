"""The rules of a manifest that span fields. Programs and preprocess steps check rules of their own."""

from __future__ import annotations

from edge.bundles.manifest import MANIFEST_NAME, Artifact, LabelPostprocess, Manifest, Tensors, Tier, broken
from edge.datatypes import NUMPY_TYPES
from edge.errors import Literally


def check(manifest: Manifest, subject: str) -> None:
    """Check the rules that span fields; raise a BundleError with the field's name for the first that is broken."""
    _check_tensors(Tensors(manifest.inputs, manifest.outputs, manifest.profile), manifest.max_batch_size, subject)
    _unique(subject, "tier name", [tier.name for tier in manifest.tiers])
    artifacts = [artifact for tier in manifest.tiers for artifact in tier.artifacts]
    goldens = sorted({manifest.golden, *(tier.golden for tier in manifest.tiers if tier.golden)})
    files = [*(artifact.file for artifact in artifacts), *goldens]
    for name in files:
        if name not in manifest.files:
            raise broken(subject, f"files entry for {name!r}", Literally("nothing"), "its size_bytes and sha256")
    _unique(subject, "file of an artifact or of the golden set", files)
    if MANIFEST_NAME in manifest.files:
        raise broken(subject, "files", MANIFEST_NAME, "every other file, because a manifest cannot hash itself")
    for artifact in artifacts:
        _check_own_tensors(manifest, artifact, subject)
    for tier in manifest.tiers:
        _check_roles(manifest, tier, subject)
    _check_preprocess(manifest, subject)
    _check_postprocess(manifest, subject)
    if manifest.program:
        manifest.program.check(manifest, subject)
    _check_serving(manifest, subject)


def _check_tensors(tensors: Tensors, max_batch_size: int, subject: str) -> None:
    specs = (*tensors.inputs, *tensors.outputs)
    for spec in specs:
        if spec.datatype not in NUMPY_TYPES:
            raise broken(subject, f"datatype of {spec.name!r}", spec.datatype, f"one of {', '.join(NUMPY_TYPES)}")
        if max_batch_size and spec.shape[0] != -1:
            raise broken(subject, f"shape of {spec.name!r}", spec.shape, "-1 first, because max_batch_size is not 0")
    _unique(subject, "tensor name", [spec.name for spec in specs])
    dynamic = {spec.name: spec for spec in tensors.inputs if -1 in spec.shape}
    if set(tensors.profile) != set(dynamic):
        expected = f"exactly the inputs with a -1 dimension: {sorted(dynamic)}"
        raise broken(subject, "profile", sorted(tensors.profile), expected)
    for name, profile in tensors.profile.items():
        field, shapes = f"profile of {name!r}", (profile.min, profile.opt, profile.max)
        for shape in shapes:
            if not dynamic[name].accepts(shape):
                raise broken(subject, field, shape, f"a shape that fits {dynamic[name].shape}")
        if not all(a <= b <= c for a, b, c in zip(*shapes, strict=True)):
            raise broken(subject, field, shapes, "min <= opt <= max in every dimension")
        if max_batch_size and profile.max[0] != max_batch_size:
            expected = f"the first dimension of max to be max_batch_size ({max_batch_size})"
            raise broken(subject, field, profile.max, expected)


def _check_own_tensors(manifest: Manifest, artifact: Artifact, subject: str) -> None:
    own = [name for name in ("inputs", "outputs", "profile") if getattr(artifact, name)]
    if not own:
        return
    subject = f"{subject} artifact {artifact.file!r}"
    if artifact.role == "model":
        given = Literally(f"{own[0]} of its own")
        raise broken(subject, "role 'model'", given, "the manifest's tensors, because clients send those")
    if artifact.inputs is None and artifact.profile:
        raise broken(subject, "profile", sorted(artifact.profile), "none, because its inputs are the manifest's")
    _check_tensors(manifest.tensors(artifact), manifest.max_batch_size, subject)


def _check_roles(manifest: Manifest, tier: Tier, subject: str) -> None:
    subject = f"{subject} tier {tier.name!r}"
    _unique(subject, "artifact", [f"{artifact.role} for {artifact.runtime}" for artifact in tier.artifacts])
    first = {artifact.role: artifact for artifact in reversed(tier.artifacts)}
    for role in manifest.program.roles if manifest.program else ("model",):
        if role not in first:
            raise broken(subject, "roles of the artifacts", sorted(first), f"{role!r} among them")
    for artifact in tier.artifacts:
        other = first[artifact.role]
        if manifest.tensors(artifact) != manifest.tensors(other):
            expected = f"the tensors of {other.file!r}, which has the same role"
            raise broken(subject, f"artifact {artifact.file!r}", Literally("tensors of its own"), expected)


def _check_preprocess(manifest: Manifest, subject: str) -> None:
    step = manifest.preprocess
    if step is None:
        return
    inputs = [spec.name for spec in manifest.inputs]
    for name in step.outputs:
        if name not in inputs:
            raise broken(subject, "preprocess output", name, f"one of {inputs}")
    if len(step.inputs) > 1 and not manifest.max_batch_size:
        expected = "a model with batches, so that two texts have as many rows"
        raise broken(subject, "preprocess pair", Literally("max_batch_size 0"), expected)
    _unique(subject, "preprocess output", list(step.outputs))
    _unique(subject, "preprocess input", [text.name for text in step.inputs])
    for text in step.inputs:
        _check_new_name(manifest, text.name, "preprocess input", subject)
    step.check(manifest, subject)


def _check_postprocess(manifest: Manifest, subject: str) -> None:
    step = manifest.postprocess
    if step is None:
        return
    logits = next((spec for spec in manifest.outputs if spec.name == step.logits), None)
    if logits is None or logits.datatype != "FP32" or logits.shape != (-1, step.columns):
        each = "a column for each label" if isinstance(step, LabelPostprocess) else "the score"
        expected = f"an FP32 output of shape {[-1, step.columns]}, {each}"
        raise broken(subject, "postprocess logits", step.logits, expected)
    _check_new_name(manifest, step.output, "postprocess output", subject)


def _check_new_name(manifest: Manifest, name: str, field: str, subject: str) -> None:
    if any(name == spec.name for spec in (*manifest.inputs, *manifest.outputs)):
        raise broken(subject, field, name, "a name that no tensor of the graph has")


def _check_serving(manifest: Manifest, subject: str) -> None:
    step = manifest.serving
    if step is None:
        return
    if step.policy == "router" and manifest.program is None:
        raise broken(subject, "serving policy", step.policy, "another one, because there is no program")
    if any(size > manifest.max_batch_size for size in step.preferred_batch_sizes):
        expected = f"at most max_batch_size ({manifest.max_batch_size})"
        raise broken(subject, "serving preferred_batch_sizes", step.preferred_batch_sizes, expected)


def _unique(subject: str, field: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise broken(subject, field, twice[0], "each name once")
