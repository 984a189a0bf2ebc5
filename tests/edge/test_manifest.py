"""Manifests: both versions, the rules that span fields, and bytes that are not a manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles import manifest_file, rules
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import FileRecord, Manifest, Profile, Serving, schema
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import TensorSpec
from edge.errors import BundleError
from edge.files import sha256
from edge.runtimes.build import load_runner
from tests.data.make_broken_bundles import HEAD, MEASURED, PREDICTION, Good
from tests.support import text_model, text_pair_model
from tests.support.models import DATA, oracle_manifest

VERSION_1 = DATA / "version_1"
ROUTER = (VERSION_1 / "bundles" / "sentiment-1" / "manifest.json").read_bytes()
LATENCIES = Good().with_field("tiers.0.latencies", [MEASURED, PREDICTION])["manifest.json"]
assert isinstance(LATENCIES, bytes)
#: A router in version 1, the same as the program of version 2, an artifact with tensors of its own, and latencies.
GOOD = [ROUTER, manifest_file.encode(manifest_file.decode(ROUTER, "r")), Good().with_artifacts(HEAD)["manifest.json"]]
GOOD += [LATENCIES]
#: The words and numbers of each, and the text between them.
WORDS = [re.findall(rb"[\w.-]+|[^\w.-]+", good) for good in GOOD]
SNIPPETS = [b"", b"-1", b"0", b"1e999", b"9" * 30, b"null", b"true", b"{}", b"[[]]", b'""', b"\\ud800", b"..", b"\xff"]
SNIPPETS += sorted({word for words in WORDS for word in words})

Change = Callable[[Manifest], Manifest]


def with_files(manifest: Manifest) -> Manifest:
    """Return a manifest with a record of every file that it names, so that its other rules can be checked."""
    names = [artifact.file for tier in manifest.tiers for artifact in tier.artifacts]
    names += [manifest.golden, *(tier.golden for tier in manifest.tiers if tier.golden)]
    names += [manifest.preprocess.file] if isinstance(manifest.preprocess, TokenizerPreprocess) else []
    return msgspec.structs.replace(manifest, files=dict.fromkeys(names, FileRecord(size_bytes=1, sha256="0" * 64)))


ORACLE, TEXT, PAIR = map(with_files, (oracle_manifest(), text_model.manifest(), text_pair_model.manifest()))


def fields(**changes: Any) -> Change:
    """Return a change of fields of a manifest; a dict changes fields of the struct in its place."""

    def change(m: Manifest) -> Manifest:
        for name, value in changes.items():
            nested = isinstance(getattr(m, name), msgspec.Struct) and isinstance(value, dict)
            value = msgspec.structs.replace(getattr(m, name), **value) if nested else value
            m = msgspec.structs.replace(m, **{name: value})
        return m

    return change


def logits(datatype: str, *shape: int, name: str = "logits") -> tuple[TensorSpec, ...]:
    return (TensorSpec(name, datatype, shape),)


def profile(least: tuple[int, ...], usual: tuple[int, ...], most: tuple[int, ...]) -> Change:
    return fields(profile={"x": Profile(min=least, opt=usual, max=most)})


own_record = fields(files={**ORACLE.files, "manifest.json": ORACLE.files["golden.npz"]})
auto_tier = fields(tiers=(TEXT.tiers[0], msgspec.structs.replace(TEXT.tiers[1], name="auto")), program={"lean": "auto"})
ONCE, NEW = "expected each name once", "expected a name that no tensor of the graph has"
LABELS = "expected an FP32 output of shape [-1, {}], a column for each label"
#: Changes of a manifest, and a part of the message.
BROKEN: list[tuple[Manifest, Change, str]] = [
    (ORACLE, own_record, "m files: got 'manifest.json', expected every other file, because a manifest cannot hash"),
    (ORACLE, fields(golden="model.onnx"), f"file of an artifact or of the golden set: got 'model.onnx', {ONCE}"),
    (ORACLE, profile((9, 15), (8, 15), (64, 15)), "got ((9, 15), (8, 15), (64, 15)), expected min <= opt <= max in ev"),
    (ORACLE, profile((1, 15), (8, 15), (63, 15)), "got (63, 15), expected the first dimension of max to be max_batch"),
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
    (PAIR, fields(preprocess={"pair": "logits"}), f"preprocess input: got 'logits', {NEW}"),
    (PAIR, fields(preprocess={"segments": "zz"}), "preprocess output: got 'zz', expected one of ['input_ids', 'attent"),
    (PAIR, fields(preprocess={"segments": "input_ids"}), f"preprocess output: got 'input_ids', {ONCE}"),
    (PAIR, fields(max_batch_size=0), "preprocess pair: got max_batch_size 0, expected a model with batches"),
]


@pytest.mark.parametrize(("good", "change", "message"), BROKEN)
def test_broken_rule_names_field_and_values(good: Manifest, change: Change, message: str):
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


def test_version_1_is_upgraded_in_memory(tmp_path: Path):
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


def part(schema: Any, older: Any) -> Any:
    """Return the part of a JSON Schema that an older one has, too, but all that is required."""
    if isinstance(schema, dict) and isinstance(older, dict):
        return {
            name: schema.get(name) if name == "required" else part(schema.get(name), value)
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
def test_mutated_manifests_raise_only_bundle_errors(index: int, data: st.DataObject, inserted: bytes):
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
