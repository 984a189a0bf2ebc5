"""The decoder of the letters in three blocks, each of which has a part of the cache that the logits need."""

from contextlib import closing

import numpy as np
from msgspec.structs import replace

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.bundles.programs import CacheTensor
from edge.datatypes import TensorSpec
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support.letters_model import LETTERS, NAME, POSITIONS, faults_of, write_letters_bundle
from tests.support.models import graph_of, serialized

#: The sum of a part of the cache, over the places that are filled.
SUM = """shape = Shape<start = 2, end = 3>({past})  places = Squeeze(shape)
    index = Range(zero, places, one)  is_filled = Less(index, lengths)  filled = Cast<to = 1>(is_filled)
    kept = Mul({earlier}, filled)  sum = ReduceSum(kept, axis)"""
#: States have the number of each letter, and the sum so far.
GRAPHS = (
    """first (int64[N, T] tokens, int64[N, 1] lengths, float[N, 1, L, 1] past_key)
    => (float[N, T, 2] states_1, float[N, 1, T, 1] new_key) {
    values = Cast<to = 1>(tokens)  new_key = Unsqueeze(values, ends)  earlier = Squeeze(past_key, ends)
    """
    + SUM.format(past="past_key", earlier="earlier")
    + """ column = Unsqueeze(values, third)  number = Mul(column, left)  sums = Unsqueeze(sum, third)
    total = Mul(sums, right)  states_1 = Add(number, total)
}""",
    """second (float[N, T, 2] states_1, int64[N, 1] lengths, float[N, 2, L, 3] past_value)
    => (float[N, T, 2] states_2, float[N, 2, T, 3] new_value) {
    column = Gather<axis = 2>(states_1, zeroth)  negative = Neg(column)
    single = Unsqueeze(negative, axis)  new_value = Expand(single, two_by_three)
    mean = ReduceMean<axes = [1, 3]>(past_value)  earlier = Squeeze(mean, ends)
    """
    + SUM.format(past="past_value", earlier="earlier")
    + """ change = Unsqueeze(sum, third)  less = Mul(change, right)  states_2 = Sub(states_1, less)
}""",
    """third (float[N, T, 2] states_2, int64[N, 1] lengths, int64[N, 1] last, float[N, 1, L, 1] past_again)
    => (float[N, 27] logits, float[N, 1, T, 1] new_again) {
    column = Gather<axis = 2>(states_2, zeroth)  sums = Gather<axis = 2>(states_2, axis)
    new_again = Unsqueeze(column, axis)  earlier = Squeeze(past_again, ends)
    """
    + SUM.format(past="past_again", earlier="earlier")
    + """ of_tokens = Squeeze(sums, third)  of_row = Gather<axis = 1>(of_tokens, zeroth)  thrice = Add(of_row, sum)
    before = Div(thrice, three)  values = Squeeze(column, third)
    shape_of_tokens = Shape<start = 1, end = 2>(values)  tokens = Squeeze(shape_of_tokens)
    index_of_tokens = Range(zero, tokens, one)  is_read = LessOrEqual(index_of_tokens, last)
    read = Cast<to = 1>(is_read)  now = Mul(values, read)  summed = ReduceSum(now, axis)  total = Add(before, summed)
    next = Mod<fmod = 1>(total, count)  distance = Sub(vocabulary, next)  size = Abs(distance)
    last_value = GatherElements<axis = 1>(values, last)  last_token = Cast<to = 7>(last_value)
    fault = Gather(faults, last_token)  offset = Gather(offsets, lengths)  finite = Add(size, offset)
    worse = Add(finite, fault)  logits = Neg(worse)
}""",
)
HIDDEN = ("states_1", "states_2")
STATES = tuple(TensorSpec(name, "FP32", (-1, -1, 2)) for name in HIDDEN)


def write_letters_in_blocks(directory, name=NAME, *, failing="z"):
    """Write the bundle; its texts, and the logits of its decoder, are those of :func:`write_letters_bundle`."""
    whole = write_letters_bundle(directory, name, failing=failing)
    (artifact,) = whole.manifest.tiers[0].artifacts
    again = [TensorSpec(f"{when}_again", "FP32", (-1, 1, -1, 1)) for when in ("past", "new")]
    specs = {spec.name: spec for spec in (*artifact.inputs, *artifact.outputs, *again, *STATES)}
    sequence = artifact.profile["tokens"]
    states = Profile(*((*shape, 2) for shape in (sequence.min, sequence.opt, sequence.max)))
    profile = {**artifact.profile, "past_again": artifact.profile["past_key"], **dict.fromkeys(HIDDEN, states)}
    constants = {
        "ends": np.array([1, 3]), "axis": np.array([1]), "third": np.array([2]), "zeroth": np.array([0]),
        "left": np.array([[[1, 0]]], np.float32), "right": np.array([[[0, 1]]], np.float32),
        "zero": np.int64(0), "one": np.int64(1), "three": np.float32(3), "count": np.float32(27),
        "vocabulary": np.arange(len(LETTERS), dtype=np.float32)[None], "two_by_three": np.array([1, 2, 1, 3]),
        "faults": faults_of(failing), "offsets": np.zeros(POSITIONS, np.float32),
    }  # fmt: skip
    step = whole.parts[artifact.file]
    values = {**step.inputs, "past_again": step.inputs["past_key"]}
    files = {file: whole.read(file) for file in ("tokenizer.json", "golden.npz")}
    blocks = []
    for number, text in enumerate(GRAPHS, 1):
        file, golden = f"decoder-{number}.onnx", f"decoder-{number}.golden.npz"
        files[file] = serialized(graph_of(text, **{key: of for key, of in constants.items() if key in text}))
        with closing(OnnxRuntimeRunner(files[file], subject=file)) as runner:
            inputs = {spec.name: values[spec.name] for spec in runner.inputs}
            outputs = runner.infer(inputs)
        values |= outputs
        files[golden] = Golden(inputs, outputs).encode()
        blocks.append(
            replace(
                artifact,
                file=file,
                role=f"backbone-{number}",
                inputs=tuple(specs[tensor] for tensor in inputs),
                outputs=tuple(specs[tensor] for tensor in outputs),
                profile={tensor: profile[tensor] for tensor in inputs},
                golden=golden,
            )
        )
    np.testing.assert_array_equal(values["logits"], step.outputs["logits"])
    program = whole.manifest.program
    cache = (*program.cache, CacheTensor(past="past_again", new="new_again"))
    manifest = replace(
        whole.manifest,
        tiers=(replace(whole.manifest.tiers[0], artifacts=tuple(blocks)),),
        program=replace(program, cache=cache, hidden=HIDDEN),
    )
    return write_bundle(directory, manifest, files, replace=True)
