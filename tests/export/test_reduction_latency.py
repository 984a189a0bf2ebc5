import msgspec
import pytest

from edge.profiling.table import LatencyTable, Shape
from export.reduction.latency import feeds_of, machine_key, measure_layers, measure_models, measure_times
from export.reduction.search import Grid
from export.transformer import LayerShape, TransformerConfig
from tests.support.reduction_data import config, model

DENSE, QUARTER = LayerShape(4, 32, 1024), LayerShape(1, 32, 256)
SETTINGS = TransformerConfig(architecture="bert", dim=256, layers=(DENSE,), vocab_size=9)


def test_smaller_layers_are_faster_and_kept_in_the_cache(tmp_path):
    cache = tmp_path / "latency" / "table.json"
    seen = []
    table = measure_layers(
        SETTINGS, [DENSE, QUARTER], [16, 64], cache=cache, calls=20, on_shape=lambda *n: seen.append(n)
    )
    assert seen == [(1, 2), (2, 2)]
    for tokens in (16, 64):
        quarter = table.find(QUARTER, tokens)
        assert quarter.calls == 20
        assert quarter.milliseconds < quarter.dense_milliseconds
    assert table.find(QUARTER, 17) is None
    assert measure_layers(SETTINGS, [QUARTER], [64], cache=cache) == table
    assert LatencyTable.read(cache) == table


@pytest.mark.parametrize("damage", ["another machine", "not JSON"])
def test_a_cache_of_another_machine_or_a_broken_one_is_replaced(tmp_path, damage):
    cache = tmp_path / "table.json"
    if damage == "not JSON":
        cache.write_text("{")
    else:
        LatencyTable(key={**machine_key(SETTINGS), "device": "another"}).write(cache)
    table = measure_layers(SETTINGS, [QUARTER], [8], cache=cache, calls=3)
    assert [timing.shape for timing in table.timings] == [Shape.of(QUARTER)]
    assert LatencyTable.read(cache) == table


def test_times_add_up_to_those_of_a_model():
    classifier = model()
    grid = Grid(((4, 8), (0, 0)), (48, 0))
    times, rest = measure_times(classifier, grid, 16, calls=20)
    assert times.attention[0] + times.feed_forward[0] == pytest.approx(1, abs=0.3)
    assert times.attention[1] < times.attention[0]
    assert rest > 0


def test_whole_models_are_compared():
    classifier, smaller = (model(dim=128, heads=heads, head_dim=32, ffn_dim=128 * heads) for heads in (4, 2))
    found = measure_models(classifier, smaller, feeds_of(config(), 32), calls=30)
    assert found.calls == 30
    assert 0 < found.milliseconds < found.dense_milliseconds
    assert found.ratio > 1


def test_images_have_no_mask():
    settings = msgspec.structs.replace(SETTINGS, architecture="vit", image_size=8, patch_size=2, channels=3)
    table = measure_layers(settings, [QUARTER], [17], calls=3)
    assert table.find(QUARTER, 17)
    assert feeds_of(settings, 17)["inputs"].shape == (1, 3, 8, 8)
