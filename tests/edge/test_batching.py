"""Joined requests: the same answers as alone, whatever their sizes and lengths, and no request harms its neighbours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.manifest import Serving, TokenizerPreprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import RunnerError
from edge.instruments.statistics import ModelStatistics
from edge.pb import inference_pb2 as pb
from edge.programs.program import Options
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.scheduling.batching import Joiner, split
from edge.scheduling.job import Answer
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler
from edge.serving.responses import ResponseBuilder
from tests.support import text_model as sentiment
from tests.support.lanes import WAIT, Awaited, job_of, lane_of, occupied, output, submitted
from tests.support.models import write_attention_bundle, write_oracle_bundle
from tests.support.server_models import write_echo_bundle

WORDS = st.sampled_from(["good", "bad", "fine", "poor", "neither"])
#: Requests of 1 to 3 rows, each of 1 to 16 words.
REQUESTS = st.lists(
    st.lists(st.lists(WORDS, min_size=1, max_size=16).map(" ".join), min_size=1, max_size=3), min_size=1, max_size=12
)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(10_000)
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="module", params=[False, True], ids=["all shapes", "few shapes"])
def text_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = tmp_path_factory.mktemp("sentiment")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OnnxRuntimeCpu, "few_shapes", request.param)
        model = loaded(sentiment.write_sentiment_bundle(directory / "bundle"), directory / "cache")
    assert model.lanes["full"].joiner.pads_alone == request.param
    yield model
    model.close()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = tmp_path_factory.mktemp("oracle")
    model = loaded(write_oracle_bundle(directory / "bundle"), directory / "cache")
    yield model
    model.close()


def loaded(bundle: Bundle, cache: Path, **options: object) -> Model:
    tiers = {tier.name: load_runner(bundle, "onnxruntime", cache, tier=tier.name) for tier in bundle.manifest.tiers}
    return Model(bundle, tiers, load_memory_bytes=0, options=ServingOptions(**options))


def texts(rows: list[str]) -> Array:
    array = np.empty((len(rows), 1), np.object_)
    array[:, 0] = [row.encode() for row in rows]
    return array


def alone(model: Model, tier: str, inputs: dict[str, Array]) -> dict[str, Array]:
    return model.program.compute(inputs, Options(tier)).outputs


@given(REQUESTS, st.sampled_from(["full", "lean", "auto"]))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_of_any_lengths_are_answered_as_alone(
    scheduler: Scheduler, text_model: Model, requests: list[list[str]], tier: str
) -> None:
    feeds = [text_model.prepare({"text": texts(rows)}) for rows in requests]
    statistics = ModelStatistics()
    with occupied(scheduler):
        jobs = [
            submitted(scheduler, Awaited(text_model.lanes[tier], feed.inputs, feed.rows, statistics=statistics))
            for feed in feeds
        ]
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


def test_no_label_is_made_from_nonfinite_logits(text_model: Model) -> None:
    def build(names: list[str], logits: list[float]) -> pb.ModelInferResponse:
        outputs = {"logits": np.array([logits], np.float32)}
        bad = () if np.isfinite(outputs["logits"]).all() else ("logits",)
        return ResponseBuilder().build(
            text_model, Answer(outputs, {}, bad), names, request_id="", tier="full", windows={}
        )

    assert build(["label"], [0.0, 1.0]).raw_output_contents[0].endswith(b"positive")
    for wrong in (np.nan, np.inf):
        with pytest.raises(RunnerError, match=r"output 'label' .*: got a NaN or an infinity in 'logits', expected"):
            build(["logits", "label"], [0.0, wrong])
        sent = np.frombuffer(build(["logits"], [0.0, wrong]).raw_output_contents[0], np.float32)
        np.testing.assert_array_equal(sent, np.array([0.0, wrong], np.float32))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_any_number_are_answered_as_alone(
    scheduler: Scheduler, oracle: Model, sizes: list[int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    requests = [{"x": generator.normal(size=(rows, 15)).astype(np.float32)} for rows in sizes]
    with occupied(scheduler):
        jobs = [submitted(scheduler, Awaited(oracle.lanes["full"], inputs, len(inputs["x"]))) for inputs in requests]
    for job, inputs in zip(jobs, requests, strict=True):
        np.testing.assert_allclose(
            job.result(WAIT).outputs["value"], alone(oracle, "full", inputs)["value"], rtol=1e-6, atol=1e-6
        )


INPUTS = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask"))
SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=6)


@given(SHAPES, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_what_is_joined_is_split_again_bit_by_bit(shapes: list[tuple[int, int]], seed: int) -> None:
    joiner = Joiner(INPUTS, {"ids": 7, "mask": 0})
    generator = np.random.default_rng(seed)
    requests = [{name: generator.integers(0, 100, shape) for name in ("ids", "mask")} for shape in shapes]
    joined = joiner.join(requests)
    width = max(width for _, width in shapes)
    assert joined["ids"].shape == (sum(rows for rows, _ in shapes), width)
    assert joiner.size(joined) == joined["ids"].size
    for part, request, (rows, own) in zip(split(joined, [r for r, _ in shapes]), requests, shapes, strict=True):
        assert np.array_equal(part["ids"][:, :own], request["ids"])
        assert np.array_equal(part["mask"][:, :own], request["mask"])
        assert (part["ids"][:, own:] == 7).all()
        assert (part["mask"][:, own:] == 0).all()
        assert len(part["ids"]) == rows


def test_padding_adds_at_most_half() -> None:
    joiner = Joiner(INPUTS, {"ids": 0, "mask": 0})
    buckets: dict[object, list[int]] = {}
    for length in range(1, 600):
        key = joiner.key({name: np.zeros((1, length), np.int64) for name in ("ids", "mask")})
        buckets.setdefault(key, []).append(length)
    assert [max(lengths) for lengths in buckets.values()][:9] == [8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert all(max(lengths) <= max(8, 1.5 * min(lengths)) for lengths in buckets.values())


def test_what_may_share_a_run() -> None:
    joiner = Joiner((*INPUTS, TensorSpec("image", "FP32", (-1, 3))), {"ids": 0, "mask": 0})

    def key(ids: int = 5, mask: int = 5, image: int = 3, dtype: object = np.float32, rows: int = 1) -> object:
        arrays = {"mask": np.zeros((rows, mask), np.int64), "ids": np.zeros((rows, ids), np.int64)}
        return joiner.key({"image": np.zeros((rows, image), dtype), **arrays})

    assert key() == key(rows=4) == key(ids=8, mask=8)
    assert len({key(), key(image=4), key(dtype=np.float64), key(ids=13, mask=13), key(mask=4)}) == 5


def test_a_key_does_not_depend_on_the_order_of_the_inputs() -> None:
    joiner = Joiner(INPUTS, {})
    ids, mask = np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64)
    assert joiner.key({"ids": ids, "mask": mask}) == joiner.key({"mask": mask, "ids": ids})


@pytest.mark.parametrize("shape", [(3, 2), (1, 2), ()])
def test_an_output_without_a_row_for_each_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(RunnerError, match="2 rows"):
        split({"y": np.zeros(shape)}, [1, 1])


def test_where_an_output_has_a_length_nothing_is_padded() -> None:
    manifest = sentiment.manifest()
    ids = {name: np.zeros((1, 5), np.int64) for name in ("input_ids", "attention_mask")}
    longer = {name: np.zeros((1, 6), np.int64) for name in ids}
    joiner = Joiner.of(manifest)
    assert joiner.key(ids) == joiner.key(longer)
    each = msgspec.structs.replace(
        manifest, outputs=(*manifest.outputs, TensorSpec("tokens", "FP32", (-1, -1))), preprocess=manifest.preprocess
    )
    joiner = Joiner.of(each)
    assert joiner.key(ids) == joiner.key(ids)
    assert joiner.key(ids) != joiner.key(longer)


def test_padding_is_the_tokenizers() -> None:
    manifest = sentiment.manifest()
    assert isinstance(manifest.preprocess, TokenizerPreprocess)
    changed = msgspec.structs.replace(manifest, preprocess=msgspec.structs.replace(manifest.preprocess, pad_id=1))
    short = {name: np.full((1, 1), 4, np.int64) for name in ("input_ids", "attention_mask")}
    long = {name: np.full((1, 3), 4, np.int64) for name in short}
    joined = Joiner.of(changed).join([short, long])
    assert joined["input_ids"].tolist() == [[4, 1, 1], [4, 4, 4]]
    assert joined["attention_mask"].tolist() == [[4, 0, 0], [4, 4, 4]]


def test_a_run_is_padded_to_the_end_of_its_bucket_where_few_shapes_are_faster() -> None:
    joiner = Joiner.of(sentiment.manifest(), few_shapes=True)
    assert joiner.pads_alone

    def width(*lengths: int) -> int:
        arrays = [np.full((1, length), 4, np.int64) for length in lengths]
        joined = joiner.join([{"input_ids": array, "attention_mask": array} for array in arrays])
        assert [row[: len(array[0])].tolist() for row, array in zip(joined["input_ids"], arrays, strict=True)] == [
            array[0].tolist() for array in arrays
        ]
        assert joined["attention_mask"].sum() == 4 * sum(lengths)
        return int(joined["input_ids"].shape[1])

    assert [width(3), width(8), width(9), width(1, 10), width(16)] == [8, 8, 12, 12, 16]
    shorter = Joiner(sentiment.manifest().inputs, {"input_ids": 0, "attention_mask": 0}, longest=10)
    one = {"input_ids": np.ones((1, 9), np.int64), "attention_mask": np.ones((1, 9), np.int64)}
    assert shorter.join([one])["input_ids"].shape == (1, 10)  # the profile's longest
    # Inputs that contradict each other stay as they are, so that the graph refuses them.
    wrong = one | {"attention_mask": np.ones((1, 8), np.int64)}
    assert {name: array.shape for name, array in joiner.join([wrong]).items()} == {
        name: array.shape for name, array in wrong.items()
    }


def test_which_lanes_join(tmp_path: Path, text_model: Model) -> None:
    assert {name: lane.max_rows for name, lane in text_model.lanes.items()} == {"full": 8, "lean": 8, "auto": 8}
    echo = loaded(write_echo_bundle(tmp_path, "FP32"), tmp_path / "cache")
    assert [lane.max_rows for lane in echo.lanes.values()] == [0]  # no batch dimension
    # Dynamic INT8 takes its scales from the whole run, so a neighbour would change a row's answer.
    manifest = sentiment.manifest()
    full, lean = manifest.tiers
    int8 = msgspec.structs.replace(lean, artifacts=(msgspec.structs.replace(lean.artifacts[0], precision="int8"),))
    files = {"tokenizer.json": sentiment.tokenizer_json()}
    for tier in sentiment.TIERS:
        files |= {f"{tier}.onnx": sentiment.model(tier), f"{tier}.npz": sentiment.golden(tier).encode()}
    mixed = msgspec.structs.replace(
        manifest,
        tiers=(full, int8),
        serving=Serving(max_queue_delay_us=500, preferred_batch_sizes=(4,)),
    )
    bundle = write_bundle(tmp_path / "mixed", mixed, files)
    model = loaded(bundle, tmp_path / "cache")
    assert {name: lane.max_rows for name, lane in model.lanes.items()} == {"full": 8, "lean": 0, "auto": 0}
    assert (model.lanes["full"].max_delay_seconds, model.lanes["full"].preferred_rows) == (0.0005, (4,))
    assert model.lanes["lean"].max_delay_seconds == 0
    assert {lane.max_rows for lane in loaded(bundle, tmp_path / "cache", batching=False).lanes.values()} == {0}
    delayed = loaded(bundle, tmp_path / "cache", max_queue_delay_us=7)
    assert delayed.lanes["full"].max_delay_seconds == 7e-6


def test_half_precision_rows_are_answered_as_alone(scheduler: Scheduler, tmp_path: Path) -> None:
    model = loaded(write_attention_bundle(tmp_path / "b", 16), tmp_path / "cache")
    generator = np.random.default_rng(0)
    requests = [generator.normal(size=(rows, 16, 32)).astype(np.float16) for rows in (1, 3, 2, 2)]
    with occupied(scheduler):
        jobs = [submitted(scheduler, Awaited(model.lanes["full"], {"x": x}, len(x))) for x in requests]
    for job, x in zip(jobs, requests, strict=True):
        expected = alone(model, "full", {"x": x})["y"]
        np.testing.assert_allclose(job.result(WAIT).outputs["y"], expected, rtol=1e-2, atol=1e-2)


def test_only_the_culprit_of_a_run_fails(scheduler: Scheduler, text_model: Model) -> None:
    """An id beyond the vocabulary fails in the graph, where no check of shapes can see it."""
    lane, statistics = text_model.lanes["full"], ModelStatistics()
    good = [text_model.prepare({"text": texts([row])}) for row in ("good", "bad bad", "fine")]
    wrong = {name: np.full((1, 2), 999, np.int64) for name in ("input_ids", "attention_mask")}
    with occupied(scheduler):
        jobs = [submitted(scheduler, Awaited(lane, feed.inputs, 1, statistics=statistics)) for feed in good]
        culprit = submitted(scheduler, Awaited(lane, wrong, 1, statistics=statistics))
        last = submitted(scheduler, Awaited(lane, good[0].inputs, 1, statistics=statistics))
    assert isinstance(culprit.exception(WAIT), RunnerError)
    for job, feed in zip([*jobs, last], [*good, good[0]], strict=True):
        assert np.array_equal(job.result(WAIT).outputs["logits"], alone(text_model, "full", feed.inputs)["logits"])
    assert {rows: batch.count for rows, batch in statistics.snapshot().batches.items()} == {1: 4}


def test_inputs_that_contradict_each_other_fail_alone(scheduler: Scheduler, text_model: Model) -> None:
    lane = text_model.lanes["full"]
    good = text_model.prepare({"text": texts(["good bad good"])})
    wrong = {"input_ids": np.ones((1, 3), np.int64), "attention_mask": np.ones((1, 2), np.int64)}
    with occupied(scheduler):
        first, culprit, last = (
            submitted(scheduler, Awaited(lane, inputs, 1)) for inputs in (good.inputs, wrong, good.inputs)
        )
    assert isinstance(culprit.exception(WAIT), RunnerError)
    assert first.result(WAIT).outputs["logits"].tolist() == last.result(WAIT).outputs["logits"].tolist() == [[1, 2]]


def test_a_neighbour_that_leaves_or_expires_harms_nobody(scheduler: Scheduler) -> None:
    sizes: list[int] = []

    def double(rows: Array) -> Array:
        sizes.append(len(rows))
        return rows * 2

    lane = lane_of(double, max_rows=100)
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lane, value, value)) for value in range(6)]
        late = submitted(scheduler, job_of(lane, 9, deadline=time.monotonic() + 0.02))
        assert jobs[1].cancel()
        assert jobs[4].cancel()
        assert late.exception(WAIT)
    answers = [output(job).ravel().tolist() for job in jobs if not job.dropped]
    assert answers == [[value * 2, value * 2] for value in (0, 2, 3, 5)]
    assert sizes == [8]


def test_tiers_are_never_mixed(scheduler: Scheduler) -> None:
    runs: list[tuple[str, int]] = []
    lanes = [lane_of(lambda x, t=tier: runs.append((t, len(x))) or x, tier, max_rows=64) for tier in ("a", "b")]
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lanes[index % 2], index)) for index in range(10)]
    assert [output(job).item() for job in jobs] == list(range(10))
    assert sorted(runs) == [("a", 5), ("b", 5)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(5, 12), st.sets(st.integers(1, 12)))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_runs_keep_the_limit_and_the_order(
    scheduler: Scheduler, sizes: list[int], limit: int, preferred: set[int]
) -> None:
    runs: list[list[float]] = []

    def work(rows: Array) -> Array:
        runs.append(rows[:, 0].tolist())
        return rows

    lane = lane_of(work, max_rows=limit, preferred_rows=tuple(size for size in preferred if size <= limit))
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lane, *[index] * rows)) for index, rows in enumerate(sizes)]
    for job in jobs:
        job.result(WAIT)
    flat = [value for run in runs for value in run]
    assert flat == [index for index, rows in enumerate(sizes) for _ in range(rows)]
    assert max(map(len, runs)) <= limit


def test_a_preferred_size_is_kept_where_more_wait(scheduler: Scheduler) -> None:
    sizes: list[int] = []
    lane = lane_of(lambda rows: sizes.append(len(rows)) or rows, max_rows=100, preferred_rows=(2, 4))
    with occupied(scheduler):
        jobs = [submitted(scheduler, job_of(lane, value)) for value in range(7)]
    for job in jobs:
        job.result(WAIT)
    assert sizes == [4, 2, 1]


def test_a_request_that_finds_the_server_idle_does_not_wait_for_others(scheduler: Scheduler) -> None:
    lane = lane_of(lambda rows: rows, max_rows=8, max_delay_seconds=30)
    begun = time.monotonic()
    assert output(submitted(scheduler, job_of(lane, 1))).tolist() == [[1]]
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("instances", [1, 2])
def test_a_request_that_finds_it_busy_waits_as_long_as_it_may(instances: int) -> None:
    scheduler = Scheduler(100, instances=instances)
    sizes: list[int] = []
    lane = lane_of(lambda rows: sizes.append(len(rows)) or rows, max_rows=3, max_delay_seconds=0.2)
    begun = time.monotonic()
    with occupied(scheduler):
        pair = [submitted(scheduler, job_of(lane, value)) for value in range(2)]
    for job in pair:
        job.result(WAIT)
    assert time.monotonic() - begun >= 0.2
    with occupied(scheduler):
        full = [submitted(scheduler, job_of(lane, value)) for value in range(3)]
    for job in full:
        job.result(WAIT)  # three are as many as fit
    scheduler.close()
    assert sizes == [2, 3]


def test_one_that_waits_for_others_delays_no_other_model() -> None:
    scheduler = Scheduler(100, instances=2)
    go = threading.Event()
    started = threading.Event()
    holding = submitted(scheduler, job_of(lane_of(lambda rows: started.set() or go.wait(WAIT) or rows), 0))
    assert started.wait(WAIT)
    patient = submitted(scheduler, job_of(lane_of(lambda rows: rows, max_rows=8, max_delay_seconds=60), 1))
    hasty = submitted(scheduler, job_of(lane_of(lambda rows: rows), 2))
    assert output(hasty).tolist() == [[2]]
    assert not patient.done()
    assert patient.cancel()
    go.set()
    holding.result(WAIT)
    scheduler.close()
