"""Joined requests: the same answers as alone, whatever their sizes and lengths, and failures stay alone."""

import logging
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Serving
from edge.datatypes import TensorSpec
from edge.errors import InvalidRequest, RunnerError
from edge.instruments.logs import NonfiniteWarnings
from edge.instruments.statistics import ModelStatistics
from edge.programs.program import Options
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.scheduling.batching import BatchAssembler, Buckets, byte_size, next_length, split
from edge.scheduling.job import JobResult
from edge.scheduling.latency import LatencyModel
from edge.scheduling.runs import nonfinite
from edge.scheduling.tier_executor import ServingOptions
from edge.serving.call import ResponseBuilder
from tests.support import text_model as sentiment
from tests.support.jobs import WAIT, Awaited, occupied, prepared, submitted
from tests.support.server_models import write_echo_bundle

INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask"))
PADDING = {"ids": 7, "mask": 0}
WORDS = st.sampled_from(["good", "bad", "fine", "poor", "neither"])
#: Requests of 1 to 3 rows, each of 1 to 16 words.
REQUESTS = st.lists(
    st.lists(st.lists(WORDS, min_size=1, max_size=16).map(" ".join), min_size=1, max_size=3), min_size=1, max_size=12
)


@pytest.fixture(scope="module", params=["all shapes", "few shapes", "few shapes, timed"])
def text_model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sentiment")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OnnxRuntimeCpu, "few_shapes", request.param != "all shapes")
        model = loaded(sentiment.write_sentiment_bundle(directory / "bundle"), directory / "cache")
    assert model.executors["full"].assembler.pads_alone == (request.param != "all shapes")
    if request.param == "few shapes, timed":
        for executor in model.executors.values():
            for size in [*range(1, sentiment.MAX_BATCH_SIZE * sentiment.MAX_LENGTH + 1)] * 32:
                executor.latency.observe(size, 1e-3)
            padded = executor.assembler.join([ids(3, 5)])["input_ids"].shape
            assert padded == ((3, 8) if executor.tier == "auto" else (4, sentiment.MAX_LENGTH))
    yield model
    model.close()


def loaded(bundle, cache, **options):
    names = [tier.name for tier in bundle.manifest.tiers]
    files = {(name, "model"): load_runner(bundle, "onnxruntime", cache, tier=name) for name in names}
    return Model(bundle, files, options=ServingOptions(**options))


def texts(*rows):
    return {"text": np.array([[row.encode()] for row in rows], np.object_)}


def ids(*shape, mask=None, value=4):
    tokens = np.full(shape, value, np.int64)
    return {"input_ids": tokens, "attention_mask": tokens if mask is None else np.full((shape[0], mask), value)}


@given(REQUESTS, st.sampled_from(["full", "lean", "auto"]))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_of_any_lengths_get_the_same_answers_as_alone(scheduler, text_model, requests, tier):
    feeds = [prepared(text_model, texts(*rows)) for rows in requests]
    executor, statistics = text_model.executors[tier], ModelStatistics()
    with occupied(scheduler):
        jobs = [submitted(scheduler, Awaited(executor, f.inputs, f.rows, statistics=statistics)) for f in feeds]
    for job, feed in zip(jobs, feeds, strict=True):
        answer = job.result(WAIT)
        computed = text_model.program.compute(feed.inputs, Options(tier))
        np.testing.assert_allclose(answer.outputs["logits"], computed.outputs["logits"], rtol=0, atol=1e-6)
        assert answer.facts.keys() == computed.facts.keys()
        for name, fact in computed.facts.items():
            np.testing.assert_array_equal(answer.facts[name], fact)
    now = statistics.snapshot()
    assert sum(rows * batch.count for rows, batch in now.batches.items()) == sum(feed.rows for feed in feeds)
    assert max(now.batches) <= sentiment.MAX_BATCH_SIZE
    # Texts of up to eight words share runs of eight rows, if their rows come out even.
    short = [feed.rows for feed in feeds if feed.inputs["input_ids"].shape[1] <= 8]
    if len(short) == len(feeds) > 1 and sum(short) <= sentiment.MAX_BATCH_SIZE:
        assert (now.execution_count, list(now.batches)) == (1, [sum(short)])


def test_rows_that_padding_adds_are_in_no_statistic(scheduler, text_model):
    executor, statistics = text_model.executors["full"], ModelStatistics()
    submitted(scheduler, Awaited(executor, ids(3, 5), 3, statistics=statistics)).result(WAIT)
    padded = executor.assembler.join([ids(3, 5)])["input_ids"].shape
    runs = statistics.runs()["full"]
    assert (runs.requests, runs.rows, runs.tokens) == (1, 3, 3 * padded[1] if executor.assembler.pads_alone else 15)
    assert [*statistics.snapshot().batches] == [3]


@pytest.mark.parametrize(
    ("culprit", "kind"),
    [(ids(1, 2, value=999), InvalidRequest), (ids(1, 3, mask=2, value=1), RunnerError)],
    ids=["vocabulary", "lengths"],
)
def test_only_the_culprit_of_a_run_fails(scheduler, text_model, culprit, kind):
    executor, statistics = text_model.executors["full"], ModelStatistics()
    good = [text_model.prepare(texts(row)).tensors for row in ("good", "bad bad", "fine")]
    with occupied(scheduler):
        jobs = [submitted(scheduler, Awaited(executor, feed, 1, statistics=statistics)) for feed in (*good, culprit)]
        jobs.append(submitted(scheduler, Awaited(executor, good[0], 1, statistics=statistics)))
    assert isinstance(jobs.pop(3).exception(WAIT), kind)
    for job, feed in zip(jobs, (*good, good[0]), strict=True):
        expected = text_model.program.compute(feed, Options("full")).outputs["logits"]
        np.testing.assert_array_equal(job.result(WAIT).outputs["logits"], expected)
    # A wrong id fails in the graph, and each is tried alone; lengths that disagree are never joined.
    batches = {1: 4} if culprit["attention_mask"].shape[1] == culprit["input_ids"].shape[1] else {4: 1}
    assert {rows: batch.count for rows, batch in statistics.snapshot().batches.items()} == batches


def test_no_label_is_made_from_nonfinite_logits(text_model):
    def build(names, logits):
        bad = () if np.isfinite(logits).all() else ("logits",)
        answer = JobResult({"logits": np.array([logits], np.float32)}, {}, bad)
        form = SimpleNamespace(model=text_model, output_names=names, classes={})
        return ResponseBuilder().build(form, answer, "", "full").outputs

    assert build(["label"], [0.0, 1.0])["label"].tolist() == [[b"positive"]]
    for wrong in (np.nan, np.inf):
        with pytest.raises(RunnerError, match=r"output 'label' .*: got a NaN or an infinity in 'logits', expected"):
            build(["logits", "label"], [0.0, wrong])
        np.testing.assert_array_equal(build(["logits"], [0.0, wrong])["logits"], np.array([[0.0, wrong]], np.float32))


def test_requests_with_equal_keys_may_share_a_run():
    assembler = BatchAssembler((*INPUTS, TensorSpec("image", "FP32", (-1, 3))), PADDING)

    def key(ids=5, mask=5, image=3, dtype=np.float32, rows=1):
        arrays = {"mask": np.zeros((rows, mask), np.int64), "ids": np.zeros((rows, ids), np.int64)}
        return assembler.key({"image": np.zeros((rows, image), dtype), **arrays})

    assert key() == key(rows=4) == key(ids=8, mask=8)
    assert len({key(), key(image=4), key(dtype=np.float64), key(ids=13, mask=13), key(mask=4)}) == 5
    # Names in any order, and lengths of like size: padding adds at most half.
    arrays = {name: np.zeros((1, 2), np.int64) for name in PADDING}
    unpadded = BatchAssembler(INPUTS, {})
    assert unpadded.key(arrays) == unpadded.key(dict(reversed(arrays.items())))
    buckets = {}
    for length in range(1, 600):
        buckets.setdefault(key(length, length), []).append(length)
    assert [max(lengths) for lengths in buckets.values()][:9] == [8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert all(max(lengths) <= max(8, 1.5 * min(lengths)) for lengths in buckets.values())
    # While they wait, they take the bytes of their arrays and of the contents of texts.
    assert byte_size({"x": np.zeros((3, 2), np.float32), "text": np.array([[b"12345"], [b"678"]], np.object_)}) == 32


@pytest.mark.parametrize("shape", [(3, 2), (1, 2), ()])
def test_outputs_without_one_row_for_each_row_are_rejected(shape):
    with pytest.raises(RunnerError) as caught:
        split({"y": np.zeros(shape)}, [1, 1])
    assert str(caught.value) == (
        f"output 'y': got shape {list(shape)} for 2 rows, expected one row for each row of the inputs. "
        "The model mixes its rows; serve it with max_batch_size 0."
    )


def test_padding_follows_the_tokenizer_unless_an_output_has_a_length():
    manifest = sentiment.manifest()
    padded = msgspec.structs.replace(manifest, preprocess=msgspec.structs.replace(manifest.preprocess, pad_id=1))
    assembler = BatchAssembler.of(padded)
    assert assembler.key(ids(1, 5)) == assembler.key(ids(1, 6))
    joined = assembler.join([ids(1, 1), ids(1, 3)])
    assert joined["input_ids"].tolist() == [[4, 1, 1], [4, 4, 4]]
    assert joined["attention_mask"].tolist() == [[4, 0, 0], [4, 4, 4]]
    assert (assembler.pads_alone, assembler.size(joined)) == (False, 6)
    longer = (*manifest.outputs, TensorSpec("tokens", "FP32", (-1, -1)))
    for changes in ({"outputs": longer}, {"max_batch_size": 0}, {"preprocess": None}):
        without = BatchAssembler.of(msgspec.structs.replace(manifest, **changes))
        assert without.key(ids(1, 5)) == without.key(ids(1, 5))
        assert without.key(ids(1, 5)) != without.key(ids(1, 6))


def test_runs_are_padded_to_the_end_of_their_bucket_where_few_shapes_are_faster():
    assembler = BatchAssembler.of(sentiment.manifest(), few_shapes=True)
    assert assembler.pads_alone
    for lengths, width in (((3,), 8), ((8,), 8), ((9,), 12), ((1, 10), 12), ((16,), 16)):
        joined = assembler.join([ids(1, length) for length in lengths])
        expected = [[4] * length + [0] * (width - length) for length in lengths]
        assert joined["attention_mask"].tolist() == expected
        assert joined["input_ids"].tolist() == expected
    shorter = BatchAssembler(sentiment.manifest().inputs, {"input_ids": 0, "attention_mask": 0}, Buckets(10))
    assert shorter.join([ids(1, 9)])["input_ids"].shape == (1, 10)  # the profile's longest
    # Inputs that contradict each other stay as they are, so that the graph rejects them.
    wrong = assembler.join([ids(1, 9, mask=8)])
    assert (wrong["input_ids"].shape, wrong["attention_mask"].shape) == ((1, 9), (1, 8))


def test_rows_are_added_where_few_shapes_are_faster_and_they_cost_little():
    table = LatencyModel()
    for rows in [*range(1, 7)] * 32:
        table.observe(rows, 1e-3)
    assembler = BatchAssembler((TensorSpec("image", "FP32", (-1, 2)),), {}, Buckets(0, most_rows=6, latency=table))
    assert assembler.pads_alone
    images = np.arange(6, dtype=np.float32).reshape(3, 2)
    joined = assembler.join([{"image": images[:1]}, {"image": images[1:]}])["image"]
    assert joined.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]  # the first one again, which is valid
    alone = images[:2]
    assert assembler.join([{"image": alone}])["image"] is alone
    parts = split({"y": joined, "z": joined[:, :1]}, [1, 2], added=1)
    assert [part["y"].tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert len(assembler.join([{"image": np.concatenate([images, images[:2]])}])["image"]) == 6


def test_tiers_join_rows_only_if_these_are_independent(tmp_path, text_model):
    def limits(model):
        return {name: executor.max_rows for name, executor in model.executors.items()}

    assert limits(text_model) == {"full": 8, "lean": 8, "auto": 8}
    echo = loaded(write_echo_bundle(tmp_path, "FP32"), tmp_path / "cache")
    assert list(limits(echo).values()) == [0]  # no batch dimension
    # Dynamic INT8 takes its scales from the whole run, so a neighbour would change a row's answer.
    manifest = sentiment.manifest()
    full, lean = manifest.tiers
    int8 = msgspec.structs.replace(lean, artifacts=(msgspec.structs.replace(lean.artifacts[0], precision="int8"),))
    serving = Serving(max_queue_delay_us=500, preferred_batch_sizes=(4,))
    mixed = msgspec.structs.replace(manifest, tiers=(full, int8), serving=serving)
    bundle = write_bundle(tmp_path / "mixed", mixed, sentiment.files())
    model = loaded(bundle, tmp_path / "cache")
    assert limits(model) == {"full": 8, "lean": 0, "auto": 0}
    assert (model.executors["full"].max_delay_seconds, model.executors["full"].preferred_rows) == (0.0005, (4,))
    assert model.executors["lean"].max_delay_seconds == 0
    assert set(limits(loaded(bundle, tmp_path / "cache", batching=False)).values()) == {0}
    delayed = loaded(bundle, tmp_path / "cache", max_queue_delay_us=7)
    assert delayed.executors["full"].max_delay_seconds == 7e-6


LONGEST, MOST_ROWS = 100, 6
SIZES = [rows * tokens for rows in range(1, MOST_ROWS + 1) for tokens in (1, 8, 12, 16, 24, 32, 48, 64, 96, LONGEST)]


def learnt(seconds, runs=32):
    table = LatencyModel()
    learn(table, seconds, runs)
    return table


def learn(table, seconds, runs):
    for size in sorted({*SIZES}) * runs:
        table.observe(size, seconds(size))


def kernel_bound(size):
    """Return the time of a device that needs a millisecond for the launches of a run."""
    return max(1e-3, 2e-5 * size)


@pytest.mark.parametrize(
    "table", [None, LatencyModel(), learnt(kernel_bound, runs=31)], ids=["none", "new", "few runs"]
)
def test_lengths_double_and_rows_stay_without_measured_times(table):
    buckets = Buckets(LONGEST, MOST_ROWS, table)
    shapes = [buckets.shape(3, tokens) for tokens in (1, 8, 9, 13, 17, 33, 97, LONGEST)]
    assert shapes == [(3, 8), (3, 8), (3, 12), (3, 16), (3, 24), (3, 48), (3, LONGEST), (3, LONGEST)]


def test_lengths_and_rows_that_take_the_same_time_share_a_bucket():
    buckets = Buckets(LONGEST, MOST_ROWS, learnt(kernel_bound))
    # 1 ms for up to 50 elements; one more bucket would cost more than a tenth.
    assert [buckets.shape(1, tokens)[1] for tokens in (1, 9, 48, 49, 65, 96)] == [48, 48, 48, 64, 100, 100]
    assert [buckets.shape(rows, 8) for rows in range(1, MOST_ROWS + 1)] == [
        (1, 48), (2, 24), (4, 12), (4, 12), (6, 8), (6, 8)
    ]  # fmt: skip
    whole = Buckets(0, MOST_ROWS, learnt(kernel_bound))  # rows of a fixed length
    assert [whole.shape(rows, 1) for rows in (1, 3, 5)] == [(1, 1), (4, 1), (6, 1)]


def test_padding_costs_at_most_a_tenth_of_the_time():
    def seconds(size):
        return 1e-3 + 5e-6 * size

    buckets = Buckets(LONGEST, MOST_ROWS, learnt(seconds))
    used = set()
    for rows in range(1, MOST_ROWS + 1):
        for tokens in range(1, LONGEST + 1):
            padded = buckets.shape(rows, tokens)
            assert padded[0] >= rows
            assert padded[1] >= tokens
            least = rows * min(next_length(tokens), LONGEST)
            # Sizes within a fourth root of two are timed as one.
            assert seconds(padded[0] * padded[1]) <= 1.15 * seconds(least)
            used.add(padded)
    assert len(used) - MOST_ROWS * LONGEST // 64 < 0.6 * MOST_ROWS * 9  # without the runs that show their own times


def test_buckets_follow_times_that_change():
    table = learnt(kernel_bound)
    buckets = Buckets(LONGEST, MOST_ROWS, table)
    assert buckets.shape(1, 8) == (1, 48)
    learn(table, lambda size: 1e-4 * size, runs=200)
    assert [buckets.shape(1, 8) for _ in range(64)][-1] == buckets.shape(1, 8) == (1, 8)


def test_padding_ends_when_only_shorter_runs_become_faster():
    """A padded size is not run any more, so some runs stay as they are and show its time."""
    buckets = Buckets(LONGEST, MOST_ROWS, table := learnt(lambda size: 1e-3))
    for _ in range(64 * 20):
        rows, tokens = buckets.shape(1, 8)
        table.observe(rows * tokens, 1e-5 * rows * tokens)
    assert buckets.shape(1, 8) == (1, 8)


def test_slow_first_runs_do_not_make_a_size_share_a_bucket():
    table = LatencyModel()
    for run in range(32):
        table.observe(8, 1e-3 if run else 0.1)  # the first one loads the device's code
        table.observe(12, 1.5e-3)
    assert Buckets(12, latency=table).shape(1, 8) == (1, 8)


FLOATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("position", [0, 500, 999])
def test_bad_number_is_found_anywhere(dtype, position):
    for bad in (np.nan, np.inf, -np.inf):
        array = np.zeros((1, 1000), dtype)
        array[0, position] = bad
        assert nonfinite({"good": np.zeros(3, dtype), "y": array}) == nonfinite({"y": array[::-1, ::-1]}) == ("y",)


def test_extreme_numbers_and_other_types_are_no_bad_numbers():
    limits = [np.finfo(dtype) for dtype in FLOATS]
    for array in (
        *(np.array([it.max, it.min, it.smallest_subnormal, -0.0], it.dtype) for it in limits),
        *(np.array([b"nan", b"inf"], np.object_), np.array([2**63 - 1]), np.array([True])),
        *(np.zeros(shape, np.float32) for shape in ((0, 4), ())),
    ):
        assert nonfinite({"y": array}) == ()


def test_one_warning_per_model_and_period(caplog):
    def logged():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    caplog.set_level(logging.WARNING, "edge.instruments.logs")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(4):
        warnings.warn("m", "half", ["logits", "value"])
    assert logged() == ["NaN or infinity in logits, value of model 'm', tier 'half'"]
    warnings.warn("other", "full", ["y"])
    assert logged() == ["NaN or infinity in y of model 'other', tier 'full'"]
    warnings._warned_at["m"] = 0.0  # an hour later
    for _ in range(2):
        warnings.warn("m", "full", ["y"])
    assert logged() == ["NaN or infinity in y of model 'm', tier 'full', and in 3 responses before"]
