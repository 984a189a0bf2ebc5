import json
from pathlib import Path

import pytest

from edge.bench import profile as profiling
from edge.bench.layer_latencies import LayerLatencies
from edge.bench.profile import profile
from edge.errors import FewheadsError, UsageError
from tests.support.boards import MODELS, orin_nano, write
from tests.support.commands import shown
from tests.support.layer_shapes import LENGTHS, MODEL, SHAPES, write_layer_shapes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_layer_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def board(tmp_path, monkeypatch):
    """Write the files of an Orin Nano at 15W, and skip the pauses between attempts."""
    monkeypatch.setattr(profiling, "_COOL_DOWN_SECONDS", 0.0)
    quiet = {"sys/class/thermal/cooling_device3/cur_state": "0\n", "var/lib/nvpmodel/status": "pmode:0000\n"}
    return write(orin_nano(tmp_path / "root", 6), quiet)


def timed(*arguments, **options):
    steps = []
    options = {"target": "onnxruntime", "calls": 3, **options}
    table = profile(*arguments, **options, on_progress=lambda *now: steps.append(now[2:]))
    return table, [step for step in steps if step[1].startswith("timing")]


def test_table_has_every_shape_and_length_and_keeps_them(shapes, cache, tmp_path):
    out = tmp_path / "table.json"
    options = ("profile", shapes, "--out", out, "--calls", 5, "--target", "onnxruntime", "--cache", cache)
    printed = json.loads(shown(*options, "--lengths", "8", "--json"))
    assert (printed, printed["label"]) == (json.loads(out.read_bytes()), "measured")
    assert printed["key"].items() >= {**MODEL, "precision": "fp32", "runtime": "onnxruntime"}.items()
    table, steps = timed(shapes, out, cache=cache)
    # Only the new length was timed.
    assert {text for _, text in steps} == {"timing 4 tokens"}
    assert {(t.shape, t.tokens) for t in table.timings} == {(shape, n) for shape in SHAPES for n in LENGTHS}
    assert LayerLatencies.read(out) == table
    assert all(t.comparison.milliseconds > 0 and t.comparison.floor_milliseconds > 0 for t in table.timings)
    assert [rest.tokens for rest in table.rest] == [8, 4]
    assert "times faster" in shown(*options)
    assert LayerLatencies.read(out) == table


def test_power_modes_are_never_mixed(shapes, cache, board, tmp_path):
    out = tmp_path / "table.json"
    table, _ = timed(shapes, out, cache=cache, lengths=(4,), root=board)
    assert (table.key["device"], table.key["power_mode"]) == (MODELS[6], "15W")
    before = out.read_bytes()
    write(board, {"var/lib/nvpmodel/status": "pmode:0002\n"})
    with pytest.raises(UsageError, match=r"key: got power_mode '15W', expected power_mode 'MAXN_SUPER'\. .*--replace"):
        timed(shapes, out, cache=cache, root=board)
    assert out.read_bytes() == before
    table, _ = timed(shapes, out, cache=cache, lengths=(8,), root=board, replace=True)
    assert {timing.tokens for timing in LayerLatencies.read(out).timings} == {8}
    before = out.read_bytes()
    (board / "var/lib/nvpmodel/status").unlink()
    with pytest.raises(UsageError, match=r"power mode: got unknown, expected the power mode of the board\. Mount "):
        timed(shapes, out, cache=cache, root=board, replace=True)
    assert out.read_bytes() == before


def test_next_run_repeats_throttled_timings_and_a_change_of_the_power_mode_ends_it(shapes, cache, board, tmp_path):
    out, alert = tmp_path / "table.json", "sys/class/thermal/cooling_device2/cur_state"

    def heat(done, shapes, name, step):
        write(board, {alert: "1\n" if name == SHAPES[1].name else "0\n"})

    def change(*now):
        write(board, {"var/lib/nvpmodel/status": "pmode:0002\n"})

    options = {"target": "onnxruntime", "calls": 3, "cache": cache, "lengths": (4,), "root": board}
    table = profile(shapes, out, on_progress=heat, **options)
    assert [timing.shape for timing in table.timings if timing.throttled] == [SHAPES[1]]
    write(board, {alert: "0\n"})
    table, steps = timed(shapes, out, **options)
    assert steps == [(SHAPES[1].name, "timing 4 tokens")]
    assert not [timing for timing in table.timings if timing.throttled]
    with pytest.raises(UsageError, match=r"power mode: got 'MAXN_SUPER', expected '15W', as at the start\."):
        profile(shapes, out, on_progress=change, **{**options, "lengths": (8,)})
    assert LayerLatencies.read(out) == table


def test_wrong_options_write_no_file_and_other_files_are_not_overwritten(shapes, cache, tmp_path):
    out = tmp_path / "table.json"
    for directory, options, message in (
        (shapes, {"lengths": (16,)}, r"--lengths: got 16, expected 4 to 8, the range of the bundles\."),
        (shapes, {"precision": "int8"}, r"--precision for onnxruntime: got 'int8', expected one of fp32\."),
        (Path("nothing"), {}, r"shapes nothing: got shapes\.json: No such file.* 'fewheads shapes'"),
    ):
        with pytest.raises(FewheadsError, match=message):
            timed(directory, out, cache=cache, **options)
        assert not out.exists()
    out.write_text("{}")
    with pytest.raises(UsageError, match=r"latency table .*missing required field `key`.*expected a latency table"):
        timed(shapes, out, cache=cache)
    assert out.read_text() == "{}"
