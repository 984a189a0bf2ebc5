import copy
from math import isclose

import numpy as np
import pytest
from msgspec.structs import replace

from edge.errors import UsageError
from export.estimate.devices import BOARD_MODES
from export.estimate.model import kernels
from export.estimate.operations import work_of
from export.estimate.roofline import predict
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape
from export.reduce import board
from export.reduce.board import count_kernels, layer_work, predict_times
from export.reduce.device import check_points, devices_of
from export.reduce.grid import Grid, Times, grid_of
from export.reduce.options import PlanOptions
from export.reduce.target import parse_target
from export.training.points import Point
from tests.support.reduction_data import config, model
from tests.support.task_data import make_transformer

ORIN = BOARD_MODES["orin-nano-super:15W"]
DENSE = LayerShape(4, 16, 128)
SIZES = {"dim": 64, "head_dim": 16, "ffn_dim": 128}
POINTS = (Point(16), Point(32, 8))


@pytest.fixture(scope="module")
def classifier():
    return model(**SIZES)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def counted(classifier, state):
    return count_kernels(classifier, cache=state / "kernels-fp16.json")


SHAPES = {"inputs": (8, 32), "mask": (8, 32)}


@pytest.mark.parametrize(
    ("shape", "first"), [(LayerShape(1, 16, 64), [False, True]), (LayerShape(0, 0, 128), [True] * 2)]
)
def test_the_work_of_layers_is_that_of_their_graph(classifier, shape, first):
    """A dense layer and another one; a head that reads the first token needs no other behind the last attention."""
    classifier = copy.deepcopy(classifier)
    classifier.pooling = "summary"
    found = list(work_of(board._file(classifier, [DENSE, shape], "fp16"), SHAPES, "a model").kernels)
    for each, first_tokens in zip((DENSE, shape), first, strict=True):
        own = layer_work(classifier.transformer.config, each, Point(32, 8), "fp16", first_tokens=first_tokens)
        for kernel in own.kernels:
            same = [one for one in found if isclose(one.gflop, kernel.gflop)]
            found.remove(next(one for one in same if replace(one, gflop=0.0) == replace(kernel, gflop=0.0)))
    (head,) = found
    assert (head.kind, head.rows) == ("product", 8)


def test_the_last_layers_have_times_of_their_own():
    grid = Grid(((4, 16), (0, 0)), (128,))
    times = Times(grid, np.array([[10.0], [5.0]]), 1.0, np.array([[3.0], [2.0]]))
    other, none = LayerShape(0, 0, 128), LayerShape(4, 16, 128)
    assert times.of([DENSE, DENSE, None]) == 1 + 10 + 3
    assert times.of([DENSE, other, none, other]) == 1 + 10 + 5 + 3 + 2
    assert times.of([other, other]) == 1 + 5 + 5  # no attention, so no last one
    assert Times.mean([times, Times(grid, times.layers, 1.0)], [1, 1]).of([DENSE]) == 1 + (3 + 10) / 2


def test_the_sum_of_layers_is_the_prediction_of_the_whole_model(classifier, counted):
    """Three layers, one dense, one without attention and one smaller: by the parts, and by an engine of all of them."""
    pytest.importorskip("tensorrt_rtx")
    settings = classifier.transformer.config
    shapes = (DENSE, LayerShape(0, 0, 64), LayerShape(2, 16, 64))
    grid = grid_of(settings)
    file = board._file(classifier, shapes, "fp16")
    names = kernels(file, board._profile(settings))
    for point, found in zip(POINTS, predict_times(counted, settings, grid, POINTS, ORIN), strict=True):
        sizes = {"inputs": (point.batch, point.tokens), "mask": (point.batch, point.tokens)}
        whole, parts = predict(work_of(file, sizes, "a model"), len(names), ORIN.mode), found.of(shapes)
        assert parts.milliseconds == pytest.approx(found.times.of(shapes))
        assert parts.milliseconds == pytest.approx(whole.milliseconds, rel=0.02)
        assert (parts.regimes, parts.bound_by) == (whole.regimes, whole.bound_by)
        assert parts.high_ms == pytest.approx(whole.high_ms, rel=0.02)


def test_a_half_that_goes_saves_kernels_and_one_that_shrinks_does_not(classifier, counted):
    assert counted.layers[True, True] > counted.layers[True, False]
    assert counted.layers[True, False] > counted.layers[False, True]
    found, _ = predict_times(counted, classifier.transformer.config, grid_of(config(**SIZES)), POINTS, ORIN)
    dense, small, halved = (found.times.of([one]) for one in (DENSE, LayerShape(1, 16, 64), LayerShape(0, 0, 128)))
    assert dense < 1.1 * small
    assert dense > 1.3 * halved
    assert found.times.of([None]) == found.times.rest < halved


def test_without_an_engine_the_kernels_of_the_graph_count(classifier, counted, monkeypatch):
    pytest.importorskip("tensorrt_rtx")
    file, settings = board._file(classifier, [DENSE], "fp16"), classifier.transformer.config
    in_engine = counted.one_layer
    monkeypatch.setattr(board, "kernels", lambda model, profile: None)
    structural, compiled = board._count(file, settings)
    assert not compiled
    assert structural == pytest.approx(in_engine, abs=5)


def test_int8_counts_the_products_that_stay_in_fp16(classifier):
    file = board._file(classifier, [DENSE], "int8")
    whole = work_of(file, {"inputs": (1, 32), "mask": (1, 32)}, "a model")
    own = layer_work(classifier.transformer.config, DENSE, Point(32), "int8")
    assert own.gflop["int8"] == pytest.approx(whole.gflop["int8"])


def test_files_to_count_are_made_of_models_whose_untrained_answers_hardly_differ():
    alike = SequenceClassifier(make_transformer(seed=5), labels=1).eval()
    alike.transformer.embeddings.word.weight.data.zero_()
    assert board._file(alike, [DENSE], "fp16")


def test_devices_say_what_their_times_are(classifier, counted, state):
    (orin,) = devices_of([ORIN], classifier, POINTS, state)
    assert orin.label.startswith("prediction")
    assert (orin.key["device"], orin.key["power_mode"], orin.key["precision"]) == (
        "Jetson Orin Nano Super",
        "15W",
        "fp16",
    )
    dense = (DENSE, DENSE)
    for point, size in zip(orin.at_points(dense, [DENSE, None]), POINTS, strict=True):
        assert (point.tokens, point.batch) == (size.tokens, size.batch)
        assert point.low_ms < point.milliseconds < point.high_ms
        assert 1 < point.speedup < 2


def test_sizes_and_devices_that_do_not_exist_are_rejected():
    with pytest.raises(UsageError, match=r"--tokens: got 64, expected at most 32, the positions of the model"):
        check_points(config(), [Point(32), Point(64)])
    images = check_points(config("vit"), [Point(32, 1, 2.0), Point(16, 1, 1.0), Point(32, 8)])
    assert images == (Point(32, 1, 3.0), Point(32, 8))  # an image has as many tokens whatever --tokens says
    for text in ("orin", "orin-nano-super:9W", "This"):
        with pytest.raises(
            UsageError, match=r"--for: got '.*', expected this, .* orin-nano-super:MAXN_SUPER.*, orin-nano:7W"
        ):
            parse_target(text)
    options = PlanOptions(2.0, "32", "1", "int8", 256, None, None)
    with pytest.raises(UsageError, match=r"--precision: got 'int8', expected nothing without --for a Jetson"):
        options.checked_precision(["this"])
    assert options._replace(precision=None).checked_precision(["this", ORIN]) == "fp16"
