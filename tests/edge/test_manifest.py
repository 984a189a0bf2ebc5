"""Manifests: both versions, the rules that span fields, those of generated text, and the accuracy of tiers."""

import json
import re
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles import manifest_file, rules
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import FileRecord, Measure, Profile, Serving, schema
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import TensorSpec
from edge.errors import BundleError
from edge.files import sha256
from edge.runtimes.build import load_runner
from edge.scheduling.tier_selection import accuracies, is_as_accurate
from tests.data.make_broken_bundles import HEAD, MEASURED, PREDICTION, Good
from tests.support import text_model, text_pair_model
from tests.support.models import DATA, oracle_manifest

VERSION_1 = DATA / "version_1"
ROUTER = (VERSION_1 / "bundles" / "sentiment-1" / "manifest.json").read_bytes()
LATENCIES = Good().with_field("tiers.0.latencies", [MEASURED, PREDICTION])["manifest.json"]
#: A router in version 1, the same as the program of version 2, an artifact with tensors of its own, and latencies.
GOOD = [ROUTER, manifest_file.encode(manifest_file.decode(ROUTER, "r")), Good().with_artifacts(HEAD)["manifest.json"]]
GOOD += [LATENCIES]
#: The words and numbers of each, and the text between them.
WORDS = [re.findall(rb"[\w.-]+|[^\w.-]+", good) for good in GOOD]
SNIPPETS = [b"", b"-1", b"0", b"1e999", b"9" * 30, b"null", b"true", b"{}", b"[[]]", b'""', b"\\ud800", b"..", b"\xff"]
SNIPPETS += sorted({word for words in WORDS for word in words})


def with_files(manifest):
    """Return a manifest with a record of every file that it names, so that its other rules can be checked."""
    names = [artifact.file for tier in manifest.tiers for artifact in tier.artifacts]
    names += [manifest.golden, *(tier.golden for tier in manifest.tiers if tier.golden)]
    names += [manifest.preprocess.file] if isinstance(manifest.preprocess, TokenizerPreprocess) else []
    return msgspec.structs.replace(manifest, files=dict.fromkeys(names, FileRecord(size_bytes=1, sha256="0" * 64)))


ORACLE, TEXT, PAIR = map(with_files, (oracle_manifest(), text_model.manifest(), text_pair_model.manifest()))
EMBEDDER = msgspec.structs.replace(TEXT, program=None, postprocess=None)


def fields(**changes):
    """Return a change of fields of a manifest; a dict changes fields of the struct in its place."""

    def change(m):
        for name, value in changes.items():
            nested = isinstance(getattr(m, name), msgspec.Struct) and isinstance(value, dict)
            value = msgspec.structs.replace(getattr(m, name), **value) if nested else value
            m = msgspec.structs.replace(m, **{name: value})
        return m

    return change


def logits(datatype, *shape, name="logits"):
    return (TensorSpec(name, datatype, shape),)


def profile(least, usual, most):
    return fields(profile={"x": Profile(min=least, opt=usual, max=most)})


def spaces(*names):
    """Return a change of the spaces of the tiers."""
    return lambda m: msgspec.structs.replace(
        m, tiers=[msgspec.structs.replace(tier, space=name) for tier, name in zip(m.tiers, names, strict=True)]
    )


own_record = fields(files={**ORACLE.files, "manifest.json": ORACLE.files["golden.npz"]})
auto_tier = fields(tiers=(TEXT.tiers[0], msgspec.structs.replace(TEXT.tiers[1], name="auto")), program={"lean": "auto"})
ONCE, NEW = "expected each name once", "expected a name that no tensor of the graph has"
LABELS = "expected an FP32 output of shape [-1, {}], a column for each label"
EMBEDDING = "space of the tiers: got '0000000000000000', expected none, or an embedding as the only output: FP32"
#: Changes of a manifest, and a part of the message.
BROKEN = [
    (ORACLE, own_record, "m files: got 'manifest.json', expected every other file, because a manifest cannot hash"),
    (ORACLE, fields(golden="model.onnx"), f"file of an artifact or of the golden set: got 'model.onnx', {ONCE}"),
    (TEXT, fields(program=None, postprocess={"labels": ("a", "b", "c")}), f"got 'logits', {LABELS.format(3)}"),
    (TEXT, fields(program=None, postprocess={"logits": "zz"}), f"m postprocess logits: got 'zz', {LABELS.format(2)}"),
    (TEXT, fields(program=None, outputs=logits("FP64", -1, 2)), f"got 'logits', {LABELS.format(2)}"),
    (PAIR, fields(outputs=logits("FP32", -1, 2)), "got 'logits', expected an FP32 output of shape [-1, 1], the score"),
    (TEXT, fields(postprocess={"output": "input_ids"}), f"postprocess output: got 'input_ids', {NEW}"),
    (TEXT, fields(preprocess={"file": "zz.json"}), "'zz.json': got nothing, expected the tokenizer of preprocess"),
    *(
        (TEXT, change, f"cascade tiers: got {got}, expected two of {tiers}, none of which is called auto")
        for change, got, tiers in (
            (fields(program={"lean": "zz"}), ("zz", "full"), ["full", "lean"]),
            (fields(program={"full": "zz"}), ("lean", "zz"), ["full", "lean"]),
            (fields(program={"lean": "full"}), ("full", "full"), ["full", "lean"]),
            (auto_tier, ("auto", "full"), ["full", "auto"]),
        )
    ),
    *(
        (TEXT, fields(postprocess=None, **changes), f"cascade logits: got {got!r}, expected an FP32 output of shape [-")
        for changes, got in (
            ({"program": {"logits": "zz"}}, "zz"),
            ({"outputs": logits("FP64", -1, 2)}, "logits"),
            ({"outputs": logits("FP32", -1, 1)}, "logits"),
            ({"outputs": logits("FP32", -1, 2, 2)}, "logits"),
            ({"outputs": logits("FP32", -1, 2), "max_batch_size": 0}, "logits"),
        )
    ),
    (TEXT, fields(program=None, serving=Serving(policy="router")), "serving policy: got 'router', expected another"),
    (TEXT, fields(serving=Serving(preferred_batch_sizes=(4, 9))), "got (4, 9), expected at most max_batch_size (8)"),
    (PAIR, fields(preprocess={"pair": "text"}), f"preprocess input: got 'text', {ONCE}"),
    (PAIR, fields(preprocess={"segments": "input_ids"}), f"preprocess output: got 'input_ids', {ONCE}"),
    (TEXT, spaces("0" * 16, "1" * 16), "'1111111111111111'], expected one for all tiers that"),
    *(
        (msgspec.structs.replace(EMBEDDER, **changes), spaces("0" * 16, "0" * 16), EMBEDDING)
        for changes in (
            {"program": TEXT.program},
            {"postprocess": TEXT.postprocess},
            {"outputs": logits("FP64", -1, 2)},
            {"outputs": logits("FP32", -1, 2, 2)},
            {"outputs": logits("FP32", -1, -1)},
            {"outputs": (*logits("FP32", -1, 2), *logits("FP32", -1, 2, name="more"))},
        )
    ),
    (PAIR, fields(max_batch_size=0), "preprocess pair: got max_batch_size 0, expected a model with batches"),
]


@pytest.mark.parametrize(("good", "change", "message"), BROKEN)
def test_broken_rule_names_field_and_values(good, change, message):
    with pytest.raises(BundleError) as caught:
        rules.check(change(good), "m")
    assert message in str(caught.value)
    assert str(caught.value).endswith(". Export the bundle again; do not edit it by hand.")


def test_values_at_the_limits_of_the_rules_are_valid():
    for good, change in (
        (ORACLE, profile((64, 15), (64, 15), (64, 15))),
        (ORACLE, fields(serving=Serving(policy="load", preferred_batch_sizes=(64, 1)))),
        (TEXT, fields(outputs=logits("FP32", -1, -1), postprocess=None)),
        (TEXT, fields(outputs=(*logits("FP32", -1, 2), *logits("FP64", -1, 9, name="zz")))),
        (TEXT, fields(max_batch_size=0, program=None)),
        (EMBEDDER, spaces("0" * 16, None)),
        (PAIR, fields(preprocess=None, postprocess=None)),
    ):
        rules.check(good, "m")
        rules.check(change(good), "m")


def test_latencies_are_kept_by_a_round_trip_and_bound_their_own_band():
    decoded = manifest_file.decode(LATENCIES, "m")
    again = json.loads(manifest_file.encode(decoded))
    assert again["tiers"][0]["latencies"] == [MEASURED, PREDICTION]
    at_the_bounds = {**PREDICTION, "low_ms": 0.5, "high_ms": 0.5}
    decoded = manifest_file.decode(Good().with_field("tiers.0.latencies", [at_the_bounds])["manifest.json"], "m")
    assert decoded.tiers[0].latencies[0].milliseconds == 0.5


def test_version_1_is_upgraded_in_memory(tmp_path):
    for name, expected, encoded_sha256 in (
        ("calculator-oracle-1", oracle_manifest(), "afffd95ccaecafdfe7aaa63283365d2ce3032867547ceb1df0cd5d837d4f0e83"),
        ("sentiment-1", text_model.manifest(), "3c1228620201ca3262fa03fa3158d2da561c61ddc867546096bcc3cb3daae7fc"),
    ):
        bundle = Bundle.open(VERSION_1 / "bundles" / name)
        assert msgspec.structs.replace(bundle.manifest, files={}) == expected
        for tier in bundle.manifest.tiers:
            assert load_runner(bundle, "onnxruntime", tmp_path, tier=tier.name).golden_report.passed
        # The cache of builds is named by this hash: a device that upgrades Fewheads keeps its builds.
        assert sha256(manifest_file.encode(bundle.manifest)) == encoded_sha256


def part(schema, older):
    """Return the part of a JSON Schema that an older one has, too, but all that is required; limits may be higher."""
    if isinstance(schema, dict) and isinstance(older, dict):
        found = {name: schema.get(name) for name in older}
        higher = {name for name in ("maxItems", "maxProperties") if name in older and found[name] > older[name]}
        return {
            name: found[name] if name == "required" else value if name in higher else part(found[name], value)
            for name, value in older.items()
        }
    if isinstance(schema, list) and isinstance(older, list):
        return [option for option in older if any(part(each, option) == option for each in schema)]
    return schema


def test_version_2_has_every_field_of_version_1_as_it_was():
    pinned = json.loads((VERSION_1 / "manifest.schema.json").read_bytes())
    assert part(json.loads(json.dumps(schema()["$defs"])), pinned) == pinned


def test_version_1_obeys_the_rules_of_its_program():
    for router, message in (
        ({**json.loads(ROUTER)["router"], "full": "zz"}, "cascade tiers: got ('lean', 'zz'), expected two of"),
        ({"lean": "full"}, "missing required field `full` - at `$.program`, expected the manifest schema of version 1"),
        (5, "Expected `object | null`, got `int` - at `$.program`"),
    ):
        with pytest.raises(BundleError, match=re.escape(message)):
            manifest_file.decode(json.dumps({**json.loads(ROUTER), "router": router}).encode(), "m")


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.data(), st.binary(max_size=60))
def test_mutated_manifests_raise_only_bundle_errors(index, data, inserted):
    good, words = GOOD[index], WORDS[index]
    assert manifest_file.decode(good, "manifest").tiers
    position, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 60))
    word, other = data.draw(st.integers(0, len(words) - 1)), data.draw(st.sampled_from(SNIPPETS))
    for mutated in (
        good[:position] + inserted + good[position + length :],
        b"".join([*words[:word], other, *words[word + 1 :]]),
    ):
        with suppress(BundleError):
            manifest_file.decode(mutated, "manifest")


def test_measures_are_of_the_tier_and_runtime_that_their_splits_name():
    splits = {
        "dev, tier x1": 0.9,
        "dev, tier x1-int8 on onnxruntime": 0.8,
        "dev, tier x1-int8 on tensorrt": 0.7,
        "dev, tier other": 0.6,
        "dev": 0.5,
        "golden inputs: random, tier x1-int8, int8 for onnxruntime, output y": 0.4,
    }
    measures = [Measure("accuracy", split, value, 9) for split, value in splits.items()]
    measures += [
        Measure("accuracy, difference to FP32", "dev, tier x1-int8 on onnxruntime", -0.1, 9),
        Measure("rmse", "dev, tier x1", 3.0, 9),  # of which less is better
        Measure("f1", "test, all of it, tier x1", 0.3, 7),
    ]
    key = ("accuracy", "dev", 9)
    for runtime, value in (("onnxruntime", 0.8), ("tensorrt", 0.7), ("any", None)):
        assert accuracies(measures, {"x1": "any", "x1-int8": runtime, "x2": "any"}) == {
            "x1": {key: 0.9, ("f1", "test, all of it", 7): 0.3},
            "x1-int8": {key: value} if value else {},
            "x2": {},
        }


def test_a_tier_is_as_accurate_only_by_all_measures_that_both_have():
    dev, test, fewer = ("f1", "dev", 9), ("f1", "test", 9), ("f1", "dev", 8)
    assert is_as_accurate({dev: 0.8, test: 0.1}, {dev: 0.8})
    assert not is_as_accurate({dev: 0.8, test: 0.1}, {dev: 0.7, test: 0.2})
    assert not is_as_accurate({dev: 0.8}, {fewer: 0.7})
    assert not is_as_accurate({}, {})
