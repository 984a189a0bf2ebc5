import numpy as np
import pytest

from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer, shuffled_batches, sorted_batches
from export.errors import CheckpointError
from tests.support.task_data import make_tokenizer

PAIR = ("good film", "the plot was bad")


def test_pairs_have_segments_and_batches_are_padded_to_their_longest():
    rows = encode(make_tokenizer(), Examples((PAIR, ("cat", "mat")), np.array([1, 0])), 64)
    assert rows.lengths.tolist() == [9, 5]
    batch = rows.batch(np.array([1, 0]))
    assert (batch.inputs.shape, batch.mask.tolist()[0]) == ((2, 9), [1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert (batch.segments.tolist()[1], batch.inputs[0, 5:].tolist()) == ([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0])
    assert batch.targets.tolist() == [0, 1]
    single = encode(make_tokenizer(), Examples((("good film",),), np.array([1])), 64)
    assert single.tokens[0].tolist()[0] == 2  # [CLS]
    assert single.segments[0].tolist() == [0, 0, 0, 0]


def test_truncation_cuts_the_longer_text_and_leaves_no_trace_in_the_tokenizer():
    tokenizer = make_tokenizer()
    assert encode(tokenizer, Examples((PAIR,), np.array([1])), 7).segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.truncation is None


def test_sorted_batches_are_longest_first():
    assert [batch.tolist() for batch in sorted_batches(np.array([3, 9, 5, 9]), 3)] == [[1, 3, 2], [0]]


def test_shuffled_batches_are_deterministic_and_short_of_padding():
    lengths = np.random.default_rng(0).integers(5, 100, 2000)
    batches = shuffled_batches(lengths, 32, seed=0, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(2000))
    again = shuffled_batches(lengths, 32, seed=0, epoch=0)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))
    for other in (shuffled_batches(lengths, 32, seed=0, epoch=1), shuffled_batches(lengths, 32, seed=1, epoch=0)):
        assert not np.array_equal(np.concatenate(batches), np.concatenate(other))
    assert sum(len(batch) * lengths[batch].max() for batch in batches) < 1.1 * lengths.sum()
    # Long and short batches take turns.
    firsts = [lengths[batch].mean() for batch in batches[:20]]
    assert min(firsts) < 30
    assert max(firsts) > 70


def test_load_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.enable_padding()
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.padding, loaded.truncation) == (None, None)
