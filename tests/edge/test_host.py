"""The decoder of runners that read the host's memory: rows come, grow, move and go, each as if it were alone."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge.runtimes.host import HostDecoder, copying
from tests.support.decoder_rows import Rows

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
    return Rows(letters._runners["full"].decoder(letters.tensors))


@settings(max_examples=150, deadline=None)
@given(Actions, st.booleans())
@example([[40], [3], 1], False)  # a short row makes the cache of a long one grow
def test_rows_that_join_and_leave_in_any_order_are_as_if_alone(letters, actions, copies):
    runner = letters._runners["full"]
    decoder = runner.decoder(letters.tensors)
    if copies:  # as for runners whose arrays are not on the host
        decoder = HostDecoder(runner, letters.tensors, copying(runner))
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
