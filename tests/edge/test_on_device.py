"""``fewheads bench --on-device``: the record, the reasons not to publish it, and its tables."""

import json
import shutil
import time

import msgspec
import pytest

from deploy import device_table
from edge.bench import conditions, on_device
from edge.bench.conditions import BoardWatch
from edge.bench.inputs import golden_inputs
from edge.bench.on_device import MeasurementPlan, served_elsewhere
from edge.cli.bench import publish
from edge.client import Client
from edge.errors import FewheadsError, UsageError
from tests.support.boards import orin_nano, write
from tests.support.commands import shown
from tests.support.models import ORACLE_BUNDLE
from tests.support.server_models import echo_input, write_echo_bundle
from tests.support.text_model import write_sentiment_bundle

QUICK = MeasurementPlan(requests=12, rounds=3, idle_gaps_seconds=(0.01, 0.02), idle_requests=2)
ALARM = "sys/class/hwmon/hwmon3/oc2_event_cnt"
LEVEL = "sys/class/thermal/cooling_device3/cur_state"
STATUS = "var/lib/nvpmodel/status"
GPU_LIMIT = "sys/class/devfreq/17000000.gpu/max_freq"
CURRENT = "sys/class/hwmon/hwmon1/curr1_input"


def quiet_board(root):
    return write(orin_nano(root, 6), {LEVEL: "0\n"})


@pytest.fixture
def board(tmp_path):
    return quiet_board(tmp_path / "board")


def measured(root, plan, at_idle):
    """Measure the oracle; ``at_idle`` is called once, after the idle power."""

    def advanced(done, total, step):
        if (step, done) == ("idle power", 1):
            at_idle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "_SETTLE_SECONDS", 0.0)
        patch.setattr(on_device, "_IDLE_SECONDS", 0.6)
        patch.setattr(conditions, "_POWER_SECONDS", 0.02)  # more readings than a round needs, however busy the machine
        return on_device.measure_on_device(
            [ORACLE_BUNDLE], plan, target="onnxruntime", cache=root / "cache", root=root, advanced=advanced
        )


def test_record_has_every_tier_and_batch_size_in_process_and_served(tmp_path):
    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    out = tmp_path / "record.json"
    options = ("--requests=12", "--rounds=3", "--idle-gaps=0.01,0.02", "--idle-requests=2", "--target=onnxruntime")
    command = ("bench", "--on-device", bundle.path, *options, f"--cache={tmp_path}", f"--out={out}", "--json")
    printed = json.loads(shown(*command))
    record = device_table.read_record(out)
    assert json.loads(out.read_text()) == printed
    assert {(one.tier, one.rows, one.where) for one in record.series} == {
        (tier, rows, where) for tier in ("full", "lean") for rows in (1, 8) for where in ("in process", "served")
    }
    assert all(one.latency.count >= 12 and 0 < one.latency.p50_ms <= one.latency.p99_ms for one in record.series)
    assert {(one.tier, one.gap_seconds, one.latency.count) for one in record.idle_gaps} == {
        (tier, gap, 2) for tier in ("full", "lean") for gap in (0.01, 0.02)
    }
    assert {(one.tier, one.full, one.rows) for one in record.ratios} == {("lean", "full", 1), ("lean", "full", 8)}
    assert all(one.low <= one.ratio <= one.high and one.rounds == 3 for one in record.ratios)
    assert (record.machine.board, record.publishable) == (None, True)  # this machine is not a Jetson
    assert {one.energy_millijoules for one in record.series} == {record.idle_watts}
    assert "no Jetson: " in device_table.markdown([record])


def test_model_without_a_batch_has_one_size(tmp_path):
    bundle = write_echo_bundle(tmp_path, "FP32")  # its golden input has two values
    assert [request[echo_input("FP32")].shape for request in golden_inputs(bundle, 1)] == [(2,)]
    with pytest.raises(UsageError, match="--rows: got 2, expected 1, since echo-fp32 has no batch"):
        golden_inputs(bundle, 2)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A record of the board, whose current rises by an ampere after the idle measurement."""
    root = quiet_board(tmp_path_factory.mktemp("record"))
    return measured(root, QUICK, lambda: write(root, {CURRENT: "2312\n"}))


def test_record_has_the_state_of_the_board_and_energy(record):
    assert record.machine.label == (
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super, MAXN_SUPER, JetPack 6.2.2"
    )
    state = record.before
    assert state.limits_hertz == {"gpu-min": 306e6, "gpu-max": 1020e6, "emc-max": 3199e6}
    assert (state.frequencies_hertz["gpu"], state.memory_bytes["device_used"]) == (306e6, 524688 * 1024)
    assert state.throttling_events == {"oc1": 0, "oc2": 15, "oc3": 37}
    assert state.throttling_levels == {"cpu-throttle-alert": 0, "gpu-throttle-alert": 0}
    assert record.observed["temperatures_celsius"]["tj-thermal"].high == pytest.approx(50.937)
    assert not any(name.startswith("process") for name in state.memory_bytes)
    assert record.idle_watts == pytest.approx(5.072 * 1.312)
    for one in record.series:
        assert one.power_watts == pytest.approx(5.072 * 2.312)
        assert one.energy_millijoules is not None
        # Energy is watts above idle times the time of a request, most of which is its latency.
        assert one.energy_millijoules / 5.072 >= one.latency.p50_ms / 2
    assert record.doubts == ()
    assert record.publishable


def test_changes_of_the_board_raise_doubts(board):
    online = "sys/devices/system/cpu/online"
    for path, before, after, doubt in (
        (LEVEL, "0\n", "1\n", "throttled: gpu-throttle-alert was on"),
        (GPU_LIMIT, "1020000000\n", "612000000\n", "the clock limit gpu-max changed from 1020 MHz to 612 MHz"),
        (online, "0-5\n", "0-3\n", "the processors online changed from 0-5 to 0-3"),
    ):
        write(board, {path: before})
        with BoardWatch(board) as watch:
            write(board, {path: after})
        assert watch.doubts == (doubt,)
        write(board, {path: before})


def test_other_runtime_of_the_server_raises_a_doubt(url):
    with Client(url) as client:
        assert served_elsewhere(client, {"calculator-oracle": "onnxruntime_onnx"}) == ()
        doubt = "calculator-oracle is served by onnxruntime_onnx, and in process by tensorrt_plan"
        assert served_elsewhere(client, {"calculator-oracle": "tensorrt_plan"}) == (doubt,)


def test_throttled_run_is_not_published(board, tmp_path):
    record = measured(board, MeasurementPlan(4, 1, (), 0), lambda: write(board, {ALARM: "18\n"}))
    doubt = "throttled: the alarm oc2 rose from 15 to 18"
    assert record.doubts == (doubt,)
    out = tmp_path / "record.json"
    with pytest.raises(FewheadsError, match=f"got {doubt}, expected a run without throttling") as error:
        publish(record, out, keep=False)
    assert error.value.exit_code == 1
    assert not out.exists()
    publish(record, out, keep=True)
    assert not device_table.read_record(out).publishable
    with pytest.raises(UsageError, match=rf"got {doubt}, expected a run without throttling.*Measure again"):
        device_table.markdown([device_table.read_record(out)])


def test_change_that_is_undone_raises_a_doubt(board):
    with BoardWatch(board) as watch:
        before = (board / STATUS).read_text()
        write(board, {STATUS: "pmode:0001 fmode:quiet\n"})
        deadline = time.monotonic() + 20
        while not watch.doubts and time.monotonic() < deadline:
            time.sleep(0.05)
        write(board, {STATUS: before})
    assert watch.doubts == ("the power mode changed from MAXN_SUPER to 25W",)
    assert watch.after.board == watch.before.board


def test_hidden_state_of_the_board_raises_doubts(board):
    (board / STATUS).unlink()
    for path in ("sys/class/hwmon/hwmon1", "sys/class/hwmon/hwmon3"):
        (board / path).unlink()
    shutil.rmtree(board / "sys/devices/virtual/thermal")
    with BoardWatch(board) as watch:
        pass
    assert watch.doubts == (
        "the power mode is unknown, because /var/lib/nvpmodel/status cannot be read",
        "throttling is unknown, because no alarm of the board can be read",
    )
    assert watch.before.power_watts == watch.before.temperatures_celsius == watch.before.throttling_events == {}
    assert not watch.measures_power


def test_documents_get_tables_of_jetsons_only(record, tmp_path):
    document, marks = tmp_path / "page.md", f"{device_table.BEGIN}\nold\n{device_table.END}"
    document.write_text(f"before\n{marks}\nafter\n")
    device_table.insert(document, [record])
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1], "old" in lines) == ("before", "after", False)
    served = next(one for one in record.series if one.where == "served" and one.rows == 64)
    row = next(line for line in lines if line.startswith("| `calculator-oracle`, full |") and "| 64 |" in line)
    assert f"| {served.latency.p50_ms:.3g} / {served.latency.p99_ms:.3g} |" in row
    assert any(line.startswith("| served after a pause, p50 / p99 ms | 0.01 s | 0.02 s | n |") for line in lines)
    assert any("Super, MAXN_SUPER, JetPack 6.2.2**" in line and "gpu 306 to 306 MHz" in line for line in lines)
    device_table.insert(document, [])
    assert f"{device_table.BEGIN}\n\n{device_table.NOTHING}\n\n{device_table.END}" in document.read_text()
    other = msgspec.structs.replace(record, machine=msgspec.structs.replace(record.machine, board=None))
    with pytest.raises(UsageError, match=r"record: got no Jetson: .*, expected a Jetson's, for a document"):
        device_table.insert(document, [other])
    document.write_text("without marks")
    with pytest.raises(UsageError, match="got no marks, expected the marks of the table"):
        device_table.insert(document, [record])
    document.write_text('{"format_version": 1}')
    with pytest.raises(UsageError, match="expected a device record"):
        device_table.read_record(document)
