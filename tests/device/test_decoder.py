"""Decoders on TensorRT: the logits of all tokens of each row, from a cache that never leaves the device."""

import json
from collections import Counter
from contextlib import ExitStack, closing
from itertools import pairwise

import numpy as np
import onnx
import pytest

from edge.bundles.programs import GenerateProgram
from edge.datatypes import byte_size
from edge.errors import InvalidRequest, RunnerError
from edge.programs.generate import generator
from edge.programs.program import Options
from edge.runner import DecoderTensors
from edge.runtimes.build import load_runner
from edge.runtimes.tensorrt.device import shared_device
from edge.runtimes.tensorrt.runner import TensorRtRunner
from tests.device.engines import running
from tests.device.software import LAUNCH
from tests.support.commands import shown
from tests.support.decoder_rows import Rows
from tests.support.letters_blocks import GRAPHS, write_letters_in_blocks
from tests.support.letters_model import MAX_BATCH_SIZE, NAME, continued, inputs_of, write_letters_bundle

TENSORS = DecoderTensors(
    "tokens", "lengths", "last", "logits", tuple((f"past_{kind}", f"new_{kind}") for kind in ("key", "value"))
)
#: Bytes of the cache at one place of all rows: a key of one number, and a value of six.
PLACE_BYTES = MAX_BATCH_SIZE * 7 * 4
FEWEST_PLACES, MOST_PLACES = 32, 128


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_letters_bundle(tmp_path_factory.mktemp("letters") / NAME)


@pytest.fixture(scope="module")
def cache(bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    (built,) = json.loads(shown("build", bundle.path, "--target", "tensorrt", "--cache", directory, "--json"))
    assert built["build"]["golden"]["rows"] == 2
    return directory


def runner_of(bundle, cache):
    runner = load_runner(bundle, "tensorrt", cache, role="backbone").runner
    assert isinstance(runner, TensorRtRunner)
    return runner


@pytest.fixture
def runner(bundle, cache):
    with closing(runner_of(bundle, cache)) as loaded:
        yield loaded


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_join_and_leave_have_the_logits_of_all_their_tokens(runner, seed):
    check_rows(runner.decoder(TENSORS), seed)


def check_rows(decoder, seed):
    rows = Rows(decoder)
    random = np.random.default_rng(seed)
    for _ in range(60):
        room = MAX_BATCH_SIZE - len(rows.lengths)
        if room and random.random() < 0.4:
            rows.join(*random.choice([1, 3, 31, 32, 33, 70], int(random.integers(1, room + 1))))
        for _ in range(int(random.integers(1, 4))):
            if rows.lengths and max(rows.lengths) < 99:
                rows.step()
        leaving = [place for place, length in enumerate(rows.lengths) if random.random() < 0.15 or length > 90]
        if leaving:
            rows.leave(*leaving)


def test_steps_copy_tokens_and_logits_alone_whatever_the_length_of_the_cache(runner, software):
    rows = Rows(runner.decoder(TENSORS))
    counted = []
    for lengths in ((3, 2), (60, 60)):
        rows.join(*lengths)
        # The third one launches a graph, whose copy of the logits is no call.
        counted += [list(software.copies(rows.step).values()) for _ in range(3)]
    # To the device: none, it reads the host's memory. Back: logits, in the second step for a graph, too. Within: one
    # copy of each row's new key, and one of its new value; the two rows of one length share theirs.
    assert counted == [[0, 1, 0, 4], [0, 2, 0, 4], [0, 0, 0, 4], [0, 1, 0, 6], [0, 2, 0, 6], [0, 0, 0, 6]]
    assert list(software.copies(lambda: rows.leave(0)).values()) == [0, 0, 0, 2]


@pytest.mark.parametrize(("lengths", "copies"), [((9,), 1), ((9, 9, 9, 9), 1), ((9, 9, 4, 9), 3)])
def test_a_step_with_a_graph_takes_five_calls_of_the_driver_and_copies_of_new_entries(
    runner, software, lengths, copies
):
    decoder = runner.decoder(TENSORS)
    decoder.add(np.ones((len(lengths), 9), np.int64), np.array(lengths))
    tokens = np.ones(len(lengths), np.int64)
    for _ in range(2):
        decoder.step(tokens)
    # Keys have another shape than values here, so that each takes a copy.
    assert software.counted_with_tensorrt(lambda: decoder.step(tokens)) == LAUNCH | {"cuMemcpy3DAsync": 2 * copies}


def test_the_cache_grows_with_the_places_up_to_those_of_the_profile_and_is_freed(runner, software):
    decoder = runner.decoder(TENSORS)
    assert decoder.cache_bytes == 0
    rows, sizes = Rows(decoder), []
    empty = software.live()
    rows.join(31, 3)
    for _ in range(66):
        sizes.append(decoder.cache_bytes)
        rows.step()
    rows.leave(1)
    assert sorted(set(sizes)) == [FEWEST_PLACES * PLACE_BYTES, 64 * PLACE_BYTES, MOST_PLACES * PLACE_BYTES]
    assert sizes[1:3] == [sizes[0], 2 * sizes[0]]  # a row of 32 tokens fills 32 places
    assert software.live()["bytes"] == empty["bytes"] + decoder.cache_bytes
    rows.leave(0)
    assert decoder.cache_bytes == 0
    assert software.live() == empty  # nor is there a graph for memory that is freed


def test_the_cache_shrinks_after_a_long_row_while_others_go_on(runner, software):
    decoder = runner.decoder(TENSORS)
    rows = Rows(decoder)
    sizes = []
    for lengths, failures in (((3, 70), 0), ((40,), 0), ((70,), 2), ((2,), 0)):
        rows.join(*lengths)
        for _ in range(3):  # so that a graph is launched
            rows.step()
        sizes.append(decoder.cache_bytes // PLACE_BYTES)
        software.fail("cuMemAlloc", 2, times=failures)  # it goes on with the larger one
        rows.leave(1)
        software.clear()
        sizes.append(decoder.cache_bytes // PLACE_BYTES)
        for _ in range(3):
            rows.step()
    assert sizes == [128, 32, 64, 32, 128, 128, 128, 32]
    rows.leave(0)
    assert decoder.cache_bytes == FEWEST_PLACES * PLACE_BYTES


def test_memory_of_a_dropped_decoder_is_reused(runner, software):
    lives = []
    for _ in range(3):
        decoder = runner.decoder(TENSORS)
        other = runner.decoder(TENSORS)
        for one in (decoder, other):
            rows = Rows(one)
            rows.join(40)
            rows.step()
        lives.append(software.live()["bytes"])
        del decoder, other, one, rows
    assert lives == lives[:1] * 3
    with pytest.raises(InvalidRequest, match=r"rows of model .*letters.*: got \[5, 3\], expected at most \[4, 99\]"):
        runner.decoder(TENSORS).add(np.ones((5, 3), np.int64), np.full(5, 3))


def test_a_row_whose_cache_has_no_numbers_leaves_none_behind(runner):
    decoder = runner.decoder(TENSORS)
    rows = Rows(decoder)
    rows.join(9, 9)
    device = shared_device().device
    with device:
        for address in decoder._buffers.cache.addresses().values():
            device.upload(address, np.full(FEWEST_PLACES, np.nan, np.float32))  # the row at place 0
    rows.leave(0)
    rows.step()
    rows.join(2)
    assert np.isfinite(decoder.step(np.array([1, 1]))).all()


def test_a_cache_in_fp16_has_the_same_logits(bundle, runner):
    model = in_fp16((bundle.path / "decoder.onnx").read_bytes())
    sizes = []
    with running(model, shapes_of(bundle)) as smaller:
        for decoder in (runner.decoder(TENSORS), smaller.decoder(TENSORS)):
            rows = Rows(decoder)
            rows.join(3, 40, 1)
            for _ in range(30):
                rows.step()
            rows.leave(1)
            rows.step()
            sizes.append(decoder.cache_bytes)
    assert sizes[1] == sizes[0] // 2


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("blocks")
    bundle = write_letters_in_blocks(directory / NAME)
    built = json.loads(shown("build", bundle.path, "--target", "tensorrt", "--cache", directory / "cache", "--json"))
    assert [one["build"]["golden"]["rows"] for one in built] == [2] * len(GRAPHS)
    return bundle, directory / "cache"


def test_blocks_have_the_logits_of_all_tokens_and_pass_nothing_over_the_host(blocks, software):
    bundle, cache = blocks
    with ExitStack() as stack:
        runners = [load_runner(bundle, "tensorrt", cache, role=role).runner for role in bundle.manifest.roles]
        for runner in runners:
            stack.callback(runner.close)
        program = generator(bundle, bundle.manifest.program, {"full": runners})
        check_rows(program.decoder("full"), seed=0)
        decoder = program.decoder("full")
        empty, tokens = software.live(), np.ones(2, np.int64)
        decoder.add(np.ones((2, 40), np.int64), np.array([40, 40]))
        # Logits alone go to the host. Keys of two blocks are copied together, and values apart.
        assert list(software.copies(lambda: decoder.step(tokens)).values()) == [0, 1, 0, 2]
        decoder.step(tokens)
        launched = LAUNCH | {"cuGraphLaunch": len(runners), "cuMemcpy3DAsync": 2}
        assert software.counted_with_tensorrt(lambda: decoder.step(tokens)) == launched
        for runner, run in zip(runners, decoder._buffers._steps[2], strict=True):
            check_apart(runner._engine, run)
        decoder.keep(0, [])
        assert (decoder.cache_bytes, software.live()) == (0, empty)  # nor are there graphs for memory that is freed
        decoder.add(np.ones((1, 99), np.int64), np.array([99]))
        decoder.step(tokens[:1])
        # The last block has a table of as many rows:
        with pytest.raises(InvalidRequest, match=r"input 'lengths' of .*: got 100, expected"):
            decoder.step(tokens[:1])


def check_apart(engine, run):
    """Check that no two tensors of a run share memory: the driver does not see what a kernel reads and writes."""
    shapes = (*run.shapes, *engine.output_shapes(run.profile, run.shapes))
    sizes = [byte_size(spec.datatype, of) for spec, of in zip((*engine.inputs, *engine.outputs), shapes, strict=True)]
    spans = sorted(zip(run.addresses, sizes, strict=True))
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))


def test_prompts_and_single_tokens_have_profiles_of_their_own(bundle):
    shapes = dict(shapes_of(bundle))
    steps = shapes | {"tokens": ((1, 1), (1, 1), (MAX_BATCH_SIZE, 1))}
    prompts = shapes | {"tokens": ((1, 2), (1, 8), (MAX_BATCH_SIZE, 99))}
    for past, _ in TENSORS.cache:
        least, _, (rows, heads, _, width) = shapes[past]
        prompts[past] = least, least, (rows, heads, FEWEST_PLACES, width)
    with running((bundle.path / "decoder.onnx").read_bytes(), prompts, steps) as two:
        rows = Rows(two.decoder(TENSORS))
        rows.join(1, 70)
        rows.join(1)  # of the profile for single tokens, too
        for _ in range(20):
            rows.step()
        contexts = two._engine._contexts
        assert [context.active_optimization_profile for context in contexts] == [0, 1]
        assert [context.get_tensor_shape("tokens")[1] for context in contexts] == [70, 1]
        with pytest.raises(InvalidRequest, match=r"expected at most \[1, 99\]"):
            rows.decoder.add(np.ones((1, 100), np.int64), np.array([100]))


def shapes_of(bundle):
    profile = bundle.manifest.tensors(bundle.manifest.tiers[0].artifacts[0]).profile
    return {name: (one.min, one.opt, one.max) for name, one in profile.items()}


def in_fp16(model):
    """Return a decoder with keys and values in FP16, which it computes with in FP32."""
    changed = onnx.load_from_string(model)
    graph, half = changed.graph, onnx.TensorProto.FLOAT16
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name.startswith(("past_", "new_")):
                    names[place] = f"{name}_whole"
    for tensor in (*graph.input, *graph.output):
        name = tensor.name
        if name.startswith(("past_", "new_")):
            tensor.type.tensor_type.elem_type = half
            ends, kind = ([name], [f"{name}_whole"]), 1
            if name.startswith("past_"):
                graph.node.insert(0, onnx.helper.make_node("Cast", *ends, to=kind))
            else:
                graph.node.append(onnx.helper.make_node("Cast", *reversed(ends), to=half))
    return changed.SerializeToString()


def test_a_prompt_that_fails_leaves_the_decoder_as_before(bundle, cache, software):
    failed = Counter[str]()
    for function in ("cuMemAlloc", "cuMemsetD8Async", "cuMemcpy3DAsync", "cuMemcpyDtoHAsync"):
        for nth in (1, 2, 3):
            with closing(runner_of(bundle, cache)) as runner:
                rows = Rows(runner.decoder(TENSORS))
                rows.join(3)
                software.fail(function, 2, nth, times=2)
                try:
                    rows.decoder.add(np.ones((2, 40), np.int64), np.array([40, 2]))
                except RunnerError:
                    failed[function] += 1
                    software.clear()
                    rows.step()  # the decoder is as before
                    rows.join(70)
                    rows.step()
                software.clear()
                rows = Rows(runner.decoder(TENSORS))
                rows.join(3, 40)
                for _ in range(4):
                    rows.step()
    assert failed == {"cuMemAlloc": 2, "cuMemsetD8Async": 3, "cuMemcpy3DAsync": 3, "cuMemcpyDtoHAsync": 1}


def test_texts_are_those_of_the_letters(bundle, runner):
    assert isinstance(bundle.manifest.program, GenerateProgram)
    program = generator(bundle, bundle.manifest.program, {"full": [runner]})
    prompts = ["abc", "de", "xy", "hello"]
    outputs = program.compute(inputs_of(*prompts), Options("full")).outputs
    assert [text.decode() for text in outputs["text"][:, 0]] == list(map(continued, prompts))
    program.close()
