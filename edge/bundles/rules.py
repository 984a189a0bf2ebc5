"""The rules of a manifest that span fields."""

from __future__ import annotations

from edge.bundles.manifest import MANIFEST_NAME, LabelPostprocess, Manifest, TokenizerPreprocess
from edge.datatypes import NUMPY_TYPES
from edge.errors import BundleError, Literally

EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."


def check(manifest: Manifest, subject: str) -> None:
    """Check the rules that span fields.

    Raises:
        BundleError: the first rule that is broken, with the field's name.
    """
    specs = (*manifest.inputs, *manifest.outputs)
    for spec in specs:
        if spec.datatype not in NUMPY_TYPES:
            raise _broken(subject, f"datatype of {spec.name!r}", spec.datatype, f"one of {', '.join(NUMPY_TYPES)}")
        if manifest.max_batch_size and spec.shape[0] != -1:
            raise _broken(subject, f"shape of {spec.name!r}", spec.shape, "-1 first, because max_batch_size is not 0")
    _unique(subject, "tensor name", [spec.name for spec in specs])
    _unique(subject, "tier name", [tier.name for tier in manifest.tiers])
    artifacts = [artifact for tier in manifest.tiers for artifact in tier.artifacts]
    goldens = sorted({manifest.golden, *(tier.golden for tier in manifest.tiers if tier.golden)})
    for name in (*(artifact.file for artifact in artifacts), *goldens):
        if name not in manifest.files:
            raise _broken(subject, f"files entry for {name!r}", Literally("nothing"), "its size_bytes and sha256")
    _unique(subject, "file of an artifact or of the golden set", [*(a.file for a in artifacts), *goldens])
    if MANIFEST_NAME in manifest.files:
        raise _broken(subject, "files", MANIFEST_NAME, "every other file, because a manifest cannot hash itself")
    _check_profile(manifest, subject)
    _check_preprocess(manifest, subject)
    _check_postprocess(manifest, subject)
    _check_router(manifest, subject)
    _check_serving(manifest, subject)


def _check_profile(manifest: Manifest, subject: str) -> None:
    dynamic = {spec.name: spec for spec in manifest.inputs if -1 in spec.shape}
    if set(manifest.profile) != set(dynamic):
        expected = f"exactly the inputs with a -1 dimension: {sorted(dynamic)}"
        raise _broken(subject, "profile", sorted(manifest.profile), expected)
    for name, profile in manifest.profile.items():
        for shape in (profile.min, profile.opt, profile.max):
            if not dynamic[name].accepts(shape):
                raise _broken(subject, f"profile of {name!r}", shape, f"a shape that fits {dynamic[name].shape}")
        if not all(a <= b <= c for a, b, c in zip(profile.min, profile.opt, profile.max, strict=True)):
            shapes = (profile.min, profile.opt, profile.max)
            raise _broken(subject, f"profile of {name!r}", shapes, "min <= opt <= max in every dimension")
        if manifest.max_batch_size and profile.max[0] != manifest.max_batch_size:
            expected = f"the first dimension of max to be max_batch_size ({manifest.max_batch_size})"
            raise _broken(subject, f"profile of {name!r}", profile.max, expected)


def _check_preprocess(manifest: Manifest, subject: str) -> None:
    step = manifest.preprocess
    if step is None:
        return
    for name in step.outputs:
        if manifest.input(name) is None:
            expected = f"one of {[spec.name for spec in manifest.inputs]}"
            raise _broken(subject, "preprocess output", name, expected)
    if len(step.inputs) > 1 and not manifest.max_batch_size:
        given = Literally("max_batch_size 0")
        raise _broken(subject, "preprocess pair", given, "a model with batches, so that two texts have as many rows")
    _unique(subject, "preprocess output", list(step.outputs))
    _unique(subject, "preprocess input", [text.name for text in step.inputs])
    for text in step.inputs:
        if any(text.name == spec.name for spec in (*manifest.inputs, *manifest.outputs)):
            raise _broken(subject, "preprocess input", text.name, "a name that no tensor of the graph has")
    if isinstance(step, TokenizerPreprocess) and step.file not in manifest.files:
        raise _broken(subject, f"files entry for {step.file!r}", Literally("nothing"), "the tokenizer of preprocess")


def _check_postprocess(manifest: Manifest, subject: str) -> None:
    step = manifest.postprocess
    if step is None:
        return
    logits = next((spec for spec in manifest.outputs if spec.name == step.logits), None)
    if logits is None or logits.datatype != "FP32" or logits.shape != (-1, step.columns):
        each = "a column for each label" if isinstance(step, LabelPostprocess) else "the score"
        expected = f"an FP32 output of shape {[-1, step.columns]}, {each}"
        raise _broken(subject, "postprocess logits", step.logits, expected)
    if any(step.output == spec.name for spec in (*manifest.inputs, *manifest.outputs)):
        raise _broken(subject, "postprocess output", step.output, "a name that no tensor of the graph has")


def _check_router(manifest: Manifest, subject: str) -> None:
    router, tiers = manifest.router, [tier.name for tier in manifest.tiers]
    if router is None:
        return
    if router.lean not in tiers or router.full not in tiers or router.lean == router.full or "auto" in tiers:
        given = (router.lean, router.full)
        raise _broken(subject, "router tiers", given, f"two of {tiers}, none of which is called auto")
    logits = next((spec for spec in manifest.outputs if spec.name == router.logits), None)
    has_batch = manifest.max_batch_size and all(spec.shape[0] == -1 for spec in manifest.outputs)
    # One column, a regression's, has no second label to be close to.
    has_labels = logits is not None and len(logits.shape) == 2 and logits.shape[1] != 1
    if logits is None or logits.datatype != "FP32" or not has_labels or not has_batch:
        expected = "an FP32 output of shape [-1, labels], 2 labels or more, of a model with batches"
        raise _broken(subject, "router logits", router.logits, expected)


def _check_serving(manifest: Manifest, subject: str) -> None:
    step = manifest.serving
    if step is None:
        return
    if step.policy == "router" and manifest.router is None:
        raise _broken(subject, "serving policy", step.policy, "another one, because there is no router")
    if any(size > manifest.max_batch_size for size in step.preferred_batch_sizes):
        expected = f"at most max_batch_size ({manifest.max_batch_size})"
        raise _broken(subject, "serving preferred_batch_sizes", step.preferred_batch_sizes, expected)


def _unique(subject: str, what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _broken(subject, what, twice[0], "each name once")


def _broken(subject: str, field: str, given: object, expected: str) -> BundleError:
    return BundleError(f"{subject} {field}", given=given, expected=expected, fix=EXPORT_AGAIN)
