"""The rules of a program that generates text: each has an example that breaks it."""

from collections.abc import Callable

import msgspec
import pytest

from edge.bundles import rules
from edge.bundles.manifest import Manifest, Profile
from edge.bundles.programs import CacheTensor, GenerateProgram
from edge.datatypes import TensorSpec
from edge.errors import BundleError
from tests.support.letters_model import MAX_BATCH_SIZE, POSITIONS

Change = Callable[[Manifest], Manifest]
FILE = "generate files of tier 'full'"
CACHE = "expected FP32 or FP16 [-1, heads, -1, width], as 'new_key'"


def changed(of, **fields):
    return msgspec.structs.replace(of, **fields)


def program(**fields):
    return lambda manifest: changed(manifest, program=changed(manifest.program, **fields))


def preprocess(**fields):
    return lambda manifest: changed(manifest, preprocess=changed(manifest.preprocess, **fields))


def artifact(change):
    def apply(manifest):
        (tier,) = manifest.tiers
        return changed(manifest, tiers=(changed(tier, artifacts=(change(tier.artifacts[0]),)),))

    return apply


def tensors(specs):
    """Give tensors of the file another datatype and shape."""

    def apply(found):
        def replaced(of):
            return tuple(TensorSpec(one.name, *specs.get(one.name, (one.datatype, one.shape))) for one in of or ())

        profile = dict(found.profile)
        for name in specs.keys() & profile.keys():
            least = tuple(max(size, 1) for size in specs[name][1])
            profile[name] = Profile(min=least, opt=least, max=(MAX_BATCH_SIZE, *least[1:]))
        return changed(found, inputs=replaced(found.inputs), outputs=replaced(found.outputs), profile=profile)

    return artifact(apply)


def cache(datatype, *shape):
    return tensors({"past_key": (datatype, shape), "new_key": (datatype, shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (program(text="zz"), "m generate outputs: got ['generated', 'text'], expected {'zz': ('BYTES', (-1, 1))"),
        (
            lambda manifest: changed(program(text="generated")(manifest), outputs=manifest.outputs[1:]),
            "generate outputs: got ['generated'], expected {'generated': ('INT32'",
        ),
        (
            lambda manifest: changed(
                program(text="logprobs")(manifest),
                outputs=(TensorSpec("logprobs", "BYTES", (-1, 1)), *manifest.outputs[1:]),
            ),
            "generate outputs: got ['generated', 'logprobs'], expected other names than 'logprobs' and 'token_ids'",
        ),
        (
            lambda manifest: changed(manifest, preprocess=None),
            "generate preprocess: got none, expected a tokenizer for the manifest's inputs, ids and mask",
        ),
        (program(max_tokens=POSITIONS), f"generate max_tokens: got 100, expected less than positions ({POSITIONS})"),
        (preprocess(max_length=POSITIONS), "preprocess max_length: got 100, expected less than positions (100)"),
        (
            program(cache=(CacheTensor(past="past_key", new="new_key"),) * 2),
            "generate cache: got ['new_key', 'new_key', 'past_key', 'past_key'], expected each name once",
        ),
        (
            artifact(lambda one: changed(one, golden=None)),
            "golden of artifact 'decoder.onnx': got none, expected a golden set for its own tensors",
        ),
        (program(last="zz"), f"{FILE}: got ['last', 'lengths', 'past_key', 'past_value', 'tokens'], expected"),
        (program(logits="zz"), f"{FILE}: got ['logits', 'new_key', 'new_value'], expected the outputs ["),
        (tensors({"tokens": ("INT32", (-1, -1))}), f"{FILE}, input 'tokens': got ('INT32', (-1, -1)), expected ('IN"),
        (tensors({"lengths": ("INT64", (-1, 2))}), f"{FILE}, input 'lengths': got ('INT64', (-1, 2)), expected ('IN"),
        (tensors({"last": ("FP32", (-1, 1))}), "input 'last': got ('FP32', (-1, 1)), expected ('INT64', (-1, 1))"),
        (tensors({"logits": ("FP16", (-1, 27))}), f"{FILE}, output 'logits': got ('FP16', (-1, 27)), expected FP32"),
        (tensors({"logits": ("FP32", (-1, -1))}), "'logits': got ('FP32', (-1, -1)), expected FP32 [-1, vocabulary]"),
        (program(end_tokens=(3, 27)), "generate end_tokens: got 27, expected less than the vocabulary (27)"),
        (cache("FP32", -1, 1, -1), f"{FILE}, input 'past_key': got ('FP32', (-1, 1, -1)), {CACHE}"),
        (cache("FP32", -1, -1, -1, 1), f"input 'past_key': got ('FP32', (-1, -1, -1, 1)), {CACHE}"),
        (cache("INT8", -1, 1, -1, 1), f"input 'past_key': got ('INT8', (-1, 1, -1, 1)), {CACHE}"),
        (tensors({"new_key": ("FP32", (-1, 2, -1, 1))}), "input 'past_key': got ('FP32', (-1, 1, -1, 1)), expected"),
    ],
)  # fmt: skip
def test_each_rule_names_the_field(letters_bundle, change, message):
    rules.check(letters_bundle.manifest, "m")
    with pytest.raises(BundleError) as caught:
        rules.check(change(letters_bundle.manifest), "m")
    assert message in str(caught.value)


def test_text_needs_a_model_with_batches(letters_bundle):
    manifest = changed(letters_bundle.manifest, max_batch_size=0)
    with pytest.raises(BundleError, match="generate max_batch_size: got 0, expected a model with batches"):
        rules.check(manifest, "m")


def test_numbers_of_a_program_have_limits(letters_bundle):
    found = msgspec.to_builtins(letters_bundle.manifest.program)
    for field, value in (
        ("positions", 0), ("max_tokens", 0), ("end_tokens", [-1]), ("end_tokens", list(range(65))),
        ("cache", found["cache"][:1]), ("tokens", ""), ("other", 1),
    ):  # fmt: skip
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.convert({**found, field: value}, GenerateProgram)
