"""Decoders and loops of runners that read the host's memory; those of TensorRT are tested in tests/device."""

import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge.bundles.manifest_file import decode
from edge.errors import BundleError
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import LoopLimits, Options
from edge.programs.tier_program import load_tier
from edge.repository.model import Model
from edge.runner import LoopTensors
from edge.runtimes.build import load_runner
from edge.runtimes.host import HostDecoder, HostLoop, copying
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support.decoder_rows import Rows
from tests.support.letters_model import open_letters
from tests.support.loop_model import check_requests_that_join_and_leave, prompt
from tests.support.models import graph_of, serialized

#: Bytes of the cache of one row at one place: a key of one number, and a value of six.
PLACE_BYTES = 7 * 4
FEWEST_PLACES = 32

Prompts = st.lists(st.sampled_from((1, 3, 31, 33, 40, 70)), min_size=1, max_size=3)
#: Prompts of these lengths join; so many steps; the rows at these places leave.
Actions = st.lists(
    st.one_of(Prompts, st.integers(1, 12), st.frozensets(st.integers(0, 9), min_size=1, max_size=9)),
    min_size=4,
    max_size=12,
)


@pytest.fixture
def rows(letters):
    (runner,) = letters._runners["full"]
    return Rows(runner.decoder(letters.tensors))


@settings(max_examples=150, deadline=None)
@given(Actions, st.booleans())
@example([[40], [3], 1], False)  # a short row makes the cache of a long one grow
def test_rows_that_join_and_leave_in_any_order_are_as_if_alone(letters, actions, copies):
    check_actions(letters, actions, copies)


@pytest.fixture(scope="module")
def blocks(blocks_bundle, tmp_path_factory):
    with open_letters(blocks_bundle, tmp_path_factory.mktemp("cache")) as blocks:
        yield blocks


@settings(max_examples=50, deadline=None)
@given(Actions, st.booleans())
def test_blocks_have_the_logits_of_the_whole(blocks, actions, copies):
    check_actions(blocks, actions, copies)


def check_actions(program, actions, copies):
    first, *further = program._runners["full"]
    decoder = first.decoder(program.tensors, *further)
    if copies:  # as for runners whose arrays are not on the host
        decoder = HostDecoder([(runner, copying(runner)) for runner in (first, *further)], program.tensors)
    rows = Rows(decoder)
    for action in actions:
        if isinstance(action, list):
            rows.join(*action)
        elif isinstance(action, frozenset):
            rows.leave(*action)
        else:
            for _ in range(action if all(len(row) + action < 100 for row in rows.tokens) else 0):
                rows.step()


def test_cache_grows_and_shrinks_with_the_rows(rows):
    first = rows.decoder.cache_bytes
    assert first == FEWEST_PLACES * PLACE_BYTES
    rows.join(31)
    rows.step()
    assert rows.decoder.cache_bytes == first
    rows.step()
    assert rows.decoder.cache_bytes == 2 * first  # twice the places
    rows.join(64)
    assert rows.decoder.cache_bytes == 2 * 4 * first  # and twice the rows
    rows.leave(0)
    rows.step()
    rows.leave(0)
    assert rows.decoder.cache_bytes == first
    rows.join(5)
    rows.step()


def test_cache_shrinks_after_a_long_row_while_others_go_on(rows):
    first = rows.decoder.cache_bytes
    rows.join(5)
    rows.join(90)
    rows.step()
    assert rows.decoder.cache_bytes == 2 * 4 * first  # twice the rows, and 128 places
    rows.leave(1)
    rows.step()
    assert rows.decoder.cache_bytes == 2 * first
    for longest, places in ((28, 32), (29, 64), (56, 64), (57, 128)):  # a further eighth, so that it grows later
        rows.join(longest, 90)
        rows.leave(2)
        rows.step()
        assert rows.decoder.cache_bytes == 4 * places // FEWEST_PLACES * first
        rows.leave(1)


TENSORS = LoopTensors("state", "prompt", "last", "next_state", "prediction", "residual")
#: Its prediction is the number of tokens that it computes, and its residual the sum of the state, to which it adds the
#: prompt.
COUNTING = """step (float[N, T, 2] state, float[N, T, 2] prompt, int64[N, 1] last)
    => (float[N, T, 2] next_state, float[N, 1] prediction, float[N, 1] residual) {
    next_state = Add(state, prompt)
    zeros = Mul(state, zero)
    halves = Add(zeros, half)
    tokens = ReduceSum(halves, inside)
    prediction = Squeeze(tokens, two)
    sums = ReduceSum(next_state, inside)
    residual = Squeeze(sums, two)
}"""


@pytest.fixture(params=["onnxruntime", "simulated:0.01"])
def runners(request, loop_bundle, tmp_path):
    loaded = (load_runner(loop_bundle, request.param, tmp_path, role=role) for role in ("embed", "step"))
    both = LoopRunners(*(one.runner for one in loaded))
    yield both
    for runner in both:
        runner.close()


def loop_of(bundle, runners, check_every=1):
    return Loop(msgspec.structs.replace(bundle.manifest.program, check_every=check_every), {"full": runners})


@pytest.mark.parametrize("check_every", [1, 2, 3])
def test_rows_that_join_and_leave_get_the_right_answers(loop_bundle, runners, check_every):
    check_requests_that_join_and_leave(loop_of(loop_bundle, runners, check_every), seed=check_every)


def test_a_row_that_diverges_uses_up_its_budget_beside_others(loop_bundle, runners):
    """The residual of a prompt that ends with 0 is 0 / 0."""
    computed = loop_of(loop_bundle, runners).compute({"xs": prompt(0, 1)}, Options("full", LoopLimits(7, 0.1)))
    assert computed.outputs["loops"].tolist() == [[7], [4]]
    assert computed.facts["stopped"].tolist() == ["budget", "tolerance"]
    np.testing.assert_array_equal(computed.outputs["residual"], [[np.nan], [1 / 16]])


def counting():
    constants = {"zero": np.float32(0), "half": np.float32(0.5), "inside": np.array([1, 2]), "two": np.array([2])}
    return OnnxRuntimeRunner(serialized(graph_of(COUNTING, **constants)), subject="counting")


@pytest.mark.parametrize("copies", [False, True])
def test_a_run_is_as_long_as_its_longest_row_and_reuses_its_arrays(copies):
    runner = counting()
    loop = HostLoop(runner, TENSORS, 1, copying(runner)) if copies else runner.loop(TENSORS)

    def add(rows, tokens, value):
        loop.add(np.zeros((rows, tokens, 2), np.float32), np.full((rows, tokens, 2), value, np.float32))

    def stepped():
        return np.concatenate(loop.step()).tolist()

    add(2, 3, 1)
    assert stepped() == [[3, 3], [6, 6]]
    add(1, 5, 10)
    assert stepped() == [[5, 5, 5], [12, 12, 100]]
    loop.keep(2, [(2, 0)])  # the last row takes the place of the first
    assert stepped() == [[5, 5], [200, 18]]
    loop.keep(1, [(1, 0)])
    assert stepped() == [[3], [24]]
    add(1, 2, 1)
    first, second, third = loop.step()[0], loop.step()[0], loop.step()[0]
    assert np.shares_memory(first, second)
    assert third.tolist() == [[3, 3]]
    loop.keep(0, [])
    add(1, 1, 1)
    assert stepped() == [[1], [2]]
    add(2, 4, 10)
    loop.keep(2, [])
    add(1, 2, 1)  # where a longer one was
    assert stepped() == [[4, 4, 4], [4, 80, 4]]
    runner.close()


def test_a_closed_model_keeps_no_memory_of_its_loops(loop_bundle, tmp_path):
    program = load_tier(loop_bundle, "onnxruntime", tmp_path)
    model = Model(loop_bundle, {("full", role): loaded for role, loaded in program.files.items()})
    model.measure()
    runner = program.files["step"].runner
    session = weakref.ref(runner._session)
    model.close()
    assert not session()


def test_the_number_of_loops_at_once_is_limited(loop_bundle):
    path = loop_bundle.path / "manifest.json"
    for wrong in (0, 17):
        text = path.read_text().replace('"tolerance": 0.1', f'"tolerance": 0.1, "check_every": {wrong}')
        with pytest.raises(BundleError, match="check_every"):
            decode(text.encode(), "m")
