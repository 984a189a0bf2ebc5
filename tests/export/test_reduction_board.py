import pytest

from edge.errors import UsageError
from export.estimate.devices import board_mode
from export.estimate.model import kernels
from export.estimate.operations import work_of
from export.estimate.roofline import predict
from export.points import Point
from export.reduction import board
from export.reduction.board import Structure, count_kernels, layer_work, predict_times
from export.reduction.device import check_points, devices_of
from export.reduction.grid import Grid, grid_of
from export.reduction.options import check_precision, parse_target
from export.transformer import LayerShape
from tests.support.reduction_data import config, model

ORIN = board_mode("orin-nano-super:15W")
DENSE = LayerShape(4, 16, 128)
SIZES = {"dim": 64, "head_dim": 16, "ffn_dim": 128}
POINTS = (Point(16), Point(32, 8))


@pytest.fixture(scope="module")
def classifier():
    return model(**SIZES)


@pytest.fixture(scope="module")
def counted(classifier):
    return count_kernels(classifier)


@pytest.mark.parametrize("shape", [DENSE, LayerShape(2, 16, 64), LayerShape(0, 0, 128), LayerShape(4, 16, 0)])
def test_the_work_of_a_layer_is_that_of_its_graph(classifier, counted, shape):
    settings = classifier.transformer.config
    shapes = {"inputs": (8, 32), "mask": (8, 32)}
    whole, rest = (work_of(board._file(classifier, layers, "fp16"), shapes, "a model") for layers in ([shape], []))
    own = layer_work(settings, shape, Point(32, 8), "fp16")
    assert own.gflop["fp16"] == pytest.approx(whole.gflop["fp16"] - rest.gflop["fp16"])
    assert own.weight_bytes == pytest.approx(whole.weight_bytes - rest.weight_bytes, rel=0.02)
    assert (own.products, own.attention) == (whole.products - rest.products, whole.attention - rest.attention)


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
        whole = predict(work_of(file, sizes, "a model"), len(names), ORIN.mode)
        assert found.times.of(shapes) == pytest.approx(whole.milliseconds, rel=0.02)
        assert found.low * whole.milliseconds == pytest.approx(whole.low_ms)


def test_a_half_that_goes_saves_kernels_and_one_that_shrinks_does_not(classifier, counted):
    assert counted.layers[Structure(True, True)] > counted.layers[Structure(True, False)]
    assert counted.layers[Structure(True, False)] > counted.layers[Structure(False, True)]
    found, _ = predict_times(counted, classifier.transformer.config, grid_of(config(**SIZES)), POINTS, ORIN)
    dense, small, halved = (found.times.of([one]) for one in (DENSE, LayerShape(1, 16, 64), LayerShape(0, 0, 128)))
    assert dense < 1.1 * small
    assert dense > 1.3 * halved
    assert found.times.of([None]) == found.times.rest < halved


def test_int8_has_files_of_its_own(classifier):
    counted = count_kernels(classifier, "int8")
    fp16, int8 = (layer_work(config(**SIZES), DENSE, Point(32), precision) for precision in ("fp16", "int8"))
    assert int8.gflop["int8"] + int8.gflop["fp16"] == pytest.approx(fp16.gflop["fp16"])
    assert int8.weight_bytes < fp16.weight_bytes
    assert counted.layers[Structure(True, True)] > 0


def test_devices_say_what_their_times_are(classifier, tmp_path):
    grid = Grid(((4, 16), (0, 0)), (128, 0))
    (orin,) = devices_of([ORIN], classifier, grid, POINTS, tmp_path)
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
    with pytest.raises(UsageError, match=r"--precision: got 'int8', expected nothing without --for a Jetson"):
        check_precision("int8", ["this"])
    assert check_precision(None, ["this", ORIN]) == "fp16"
