"""The rules of programs that generate texts, and of a decoder's files, in one piece or in blocks."""

import re

import msgspec
import pytest
from msgspec.structs import astuple

from edge.bundles import rules
from edge.bundles.manifest import Profile
from edge.bundles.programs import CacheTensor, GenerateProgram
from edge.datatypes import TensorSpec
from edge.errors import BundleError
from tests.support.letters_blocks import HIDDEN, STATES
from tests.support.letters_model import MAX_BATCH_SIZE, POSITIONS

FILE = "generate files of tier 'full'"
ONCE = "expected each name once"
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
            f"generate tensor: got 'new_key', {ONCE}",
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
    with pytest.raises(BundleError, match=re.escape(message)):
        rules.check(change(letters_bundle.manifest), "m")


def block(number, **fields):
    """Change fields of the file of a block, which is one more than ``number``; those of its tensors by their names."""

    def apply(manifest):
        (tier,) = manifest.tiers
        blocks = list(tier.artifacts)
        blocks[number] = changed(blocks[number], **fields)
        return changed(manifest, tiers=(changed(tier, artifacts=tuple(blocks)),))

    return apply


def states(datatype, width):
    """Give the states that the second block reads another datatype and width."""

    def apply(manifest):
        second = manifest.tiers[0].artifacts[1]
        specs = tuple(
            TensorSpec("states_1", datatype, (-1, -1, width)) if of == STATES[0] else of for of in second.inputs
        )
        shape = Profile(*((*shape[:2], width) for shape in astuple(second.profile["states_1"])))
        return block(1, inputs=specs, profile={**second.profile, "states_1": shape})(manifest)

    return apply


def fewer_tokens(manifest):
    second = manifest.tiers[0].artifacts[1]
    least, usual, (rows, tokens, width) = astuple(second.profile["states_1"])
    profile = Profile(min=least, opt=usual, max=(rows, tokens - 1, width))
    return block(1, profile={**second.profile, "states_1": profile})(manifest)


def read_twice(manifest):
    """Let the last block read a part of the cache that the second one has."""
    _, second, last = manifest.tiers[0].artifacts
    value = next(spec for spec in second.inputs if spec.name == "past_value")
    profile = {**last.profile, "past_value": second.profile["past_value"]}
    return block(2, inputs=(*last.inputs, value), profile=profile)(manifest)


def without_the_second(manifest):
    (tier,) = manifest.tiers
    first, _, last = tier.artifacts
    return changed(manifest, tiers=(changed(tier, artifacts=(first, last)),))


def one_more(manifest):
    (tier,) = manifest.tiers
    more = changed(tier.artifacts[0], role="backbone-4", file="more.onnx", golden="more.npz")
    files = dict.fromkeys(("more.onnx", "more.npz"), manifest.files["golden.npz"])
    tiers = (changed(tier, artifacts=(*tier.artifacts, more)),)
    return changed(manifest, tiers=tiers, files={**manifest.files, **files})


CACHES = f"{FILE}, caches of the blocks: got"
PARTS = "expected parts of ['past_key', 'past_value', 'past_again'], in this order"
WIDTH = "expected FP32 [-1, -1, width], as the other block has it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_the_second, "got ['backbone-1', 'backbone-3'], expected 'backbone-2' among them"),
        (program(hidden=HIDDEN[:1]), f"{CACHES} [['past_key'], ['past_value']], {PARTS}"),
        (
            lambda manifest: block(1, role="backbone-1")(block(0, role="backbone-2")(manifest)),
            f"{CACHES} [['past_value'], ['past_key'], ['past_again']], {PARTS}",
        ),
        (read_twice, f"{CACHES} [['past_key'], ['past_value'], ['past_value', 'past_again']], {PARTS}"),
        (program(hidden=HIDDEN[::-1]), f"{FILE}: got ['new_key', 'states_1'], expected the outputs ['new_key', 'st"),
        (states("FP32", 3), f"{FILE}, states 'states_1': got ('FP32', (-1, -1, 3)), {WIDTH}"),
        (states("FP16", 2), f"{FILE}, states 'states_1': got ('FP16', (-1, -1, 2)), {WIDTH}"),
        (fewer_tokens, f"{FILE}, rows, tokens and places: got [[(1, 1, 1), (2, 8, 32), (4, 98, 128)]], expected [[(1"),
        (program(hidden=("logits", "states_2")), f"generate tensor: got 'logits', {ONCE}"),
        (one_more, f"{FILE}, role: got 'backbone-4', expected one of ['backbone-1', 'backbone-2', 'backbone-3']"),
    ],
)
def test_blocks_fit_together(blocks_bundle, change, message):
    rules.check(blocks_bundle.manifest, "m")
    with pytest.raises(BundleError, match=re.escape(message)):
        rules.check(change(blocks_bundle.manifest), "m")


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
