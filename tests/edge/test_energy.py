"""Energy of runs from rails of known power: shares, idle power, tokens, rails that fail, and a real server."""

import asyncio
import random
import threading
from functools import partial

import pytest

from edge import assembly
from edge.client.connection import open_stub
from edge.instruments import energy as module
from edge.instruments.energy import EnergyMeter, ModelTier, board_rails, energy_meter
from edge.instruments.statistics import ModelStatistics
from edge.pb import telemetry_pb2
from tests.support.boards import RAILS, orin_nano, write
from tests.support.in_process import serving_here
from tests.support.sample_requests import expression

IDLE_WATTS = 5.0
FULL = ModelTier("m", "1", "full")
HALF = ModelTier("m", "1", "half")
VDD_IN_MILLIVOLTS = RAILS["VDD_IN"][0]


class Machine:
    """A board with given power and runs, on a clock of its own."""

    def __init__(self, root):
        orin_nano(root, 6)
        self.watts = 7.0  # of a run above idle
        self.now = 100.0
        self.noise = lambda: 0.0  # watts of everything else
        self.statistics = ModelStatistics()
        self.is_loading = self.current = False
        self.broken = None  # the text of the current's file in place of a number
        self._current = root / "sys/class/hwmon/hwmon1/curr1_input"
        self._due = self.now
        self.power(IDLE_WATTS)
        (rail,) = board_rails(root)
        self.meter = EnergyMeter([rail], self)

    def power(self, watts):
        text = self.broken if self.broken is not None else f"{round(watts * 1e6 / VDD_IN_MILLIVOLTS)}\n"
        with self._current.open("r+") as file:  # in place: ext4 takes 3 ms to write an emptied file again
            file.write(text)
            file.truncate()

    def running(self):
        return self.current

    def loading(self):
        return self.is_loading

    def run_count(self):
        return self.statistics.execution_count

    def runs(self):
        return {ModelTier("m", "1", tier): runs for tier, runs in self.statistics.runs().items()}

    def wait(self, seconds, *, running=False):
        """Advance the clock, and sample whenever the meter is due."""
        until = self.now + seconds
        while self._due <= until:
            self.now = self._due
            self.current = running
            self.power(IDLE_WATTS + running * self.watts + self.noise())
            self._due = self.now + self.meter.sample(self.now)
        self.now, self.current = until, False

    def run(self, seconds, tier="full", requests=1, tokens=0):
        self.wait(seconds, running=True)
        self.statistics.executed(requests, round(seconds * 1e9), tier=tier, requests=requests, size=tokens)

    def energy(self):
        self.wait(10)  # until the pool is divided
        return self.meter.energy()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_idle_power_is_measured_while_nothing_runs(machine):
    machine.is_loading, machine.noise = True, lambda: 6.0
    machine.wait(100)
    assert machine.meter.idle_watts is None  # a model was loading
    machine.is_loading, machine.noise = False, lambda: 0.0
    machine.wait(1)
    assert machine.meter.idle_watts is None
    machine.wait(3)
    assert machine.meter.idle_watts == pytest.approx(IDLE_WATTS, rel=1e-3)
    machine.run(100)
    assert machine.meter.idle_watts == pytest.approx(IDLE_WATTS, rel=1e-3)


def test_energy_of_the_whole_board(machine):
    machine.is_loading = True  # which hides idle power alone
    machine.wait(20)
    machine.is_loading = False
    machine.run(10)
    machine.broken = "N/A"
    machine.wait(1.5)  # one reading is missing
    machine.broken = None
    machine.wait(8.5)
    assert machine.meter.board_joules == pytest.approx(40 * IDLE_WATTS + 10 * machine.watts, rel=0.05)
    counted = machine.meter.board_joules
    machine.broken = "N/A"
    machine.wait(3600)
    machine.broken = None
    machine.wait(3)
    assert machine.meter.board_joules < counted + 6 * IDLE_WATTS  # what is unknown is not made up


@pytest.mark.parametrize(
    ("count", "seconds", "pauses", "rel"),
    [(1, 30, (0, 0), 0.02), (3000, 0.005, (0, 0.04), 0.15), (200, 0.02, (7, 9), 0.4)],
    ids=["one", "shorter than the 50 ms between samples", "so rare that the meter samples ten times a second"],
)
def test_energy_is_right_on_average(machine, count, seconds, pauses, rel):
    chance = random.Random(1)
    machine.wait(5)
    for _ in range(count):
        machine.wait(chance.uniform(*pauses))
        machine.run(seconds)
    found = machine.energy()[FULL]
    assert (found.requests, found.joules) == (count, pytest.approx(count * seconds * 7, rel=rel))


def test_tiers_share_in_proportion_to_their_time(machine):
    machine.wait(5)
    for _ in range(100):
        machine.run(0.06, "full", requests=4, tokens=4 * 32)
        machine.run(0.02, "half", requests=2)
    found = machine.energy()
    full, half = found[FULL], found[HALF]
    assert full.joules + half.joules == pytest.approx(8 * 7, rel=0.02)
    assert full.joules / half.joules == pytest.approx(3, rel=0.05)
    assert (full.requests, full.rows, full.tokens) == (400, 400, 400 * 32)
    assert (half.requests, half.rows, half.tokens) == (200, 200, 200)


def test_runs_before_idle_power_is_known_are_not_counted(machine):
    machine.run(20, requests=1000)
    machine.wait(5)
    machine.run(10)
    found = machine.energy()[FULL]
    assert (found.requests, found.joules) == (1, pytest.approx(70, rel=0.02))


@pytest.mark.parametrize("text", ["", "N/A\n"])
def test_unreadable_rail_is_bridged_for_up_to_a_second(machine, text):
    machine.wait(5)
    machine.run(5)
    machine.broken = text
    machine.run(0.5)
    machine.broken = None
    machine.run(4.5)
    assert machine.energy()[FULL].joules == pytest.approx(70, rel=0.03)


def test_model_added_again_and_power_below_idle_take_nothing_back(machine):
    machine.wait(5)
    machine.run(10)
    first = machine.energy()[FULL]
    machine.statistics = ModelStatistics()
    machine.run(2)
    again = machine.energy()[FULL]
    assert (again.requests, again.joules - first.joules) == (2, pytest.approx(14, rel=0.05))
    machine.watts = -2.0  # below idle
    machine.run(10)
    assert machine.energy()[FULL].joules == again.joules


def test_rails_of_the_board(tmp_path):
    def work():
        raise AssertionError("must not be made")

    assert energy_meter(work, tmp_path) is None  # a machine without rails
    (rail,) = board_rails(orin_nano(tmp_path, 6))
    assert rail.name == "VDD_IN"
    write(tmp_path, {"sys/class/hwmon/hwmon1/in1_label": "VDD_CPU_CV\n"})  # like an AGX Orin
    assert [rail.name for rail in board_rails(tmp_path)] == ["VDD_CPU_CV", "VDD_CPU_GPU_CV", "VDD_SOC"]


async def test_a_server_reports_energy(tmp_path, monkeypatch):
    """Over gRPC, with a real model and scheduler; only the rail is a file."""
    root = orin_nano(tmp_path / "board", 6)
    monkeypatch.setattr(assembly, "energy_meter", partial(energy_meter, root=root))
    for name in ("_IDLE_SECONDS", "_SETTLE_SECONDS", "_QUIET_SECONDS", "_DIVIDE_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    async with serving_here(tmp_path, target="simulated:2") as channel:
        stub = open_stub(channel)

        async def reading():
            return await stub.Get(telemetry_pb2.GetRequest())

        while not (idle := await reading()).HasField("idle_power_watts"):
            await asyncio.sleep(0.05)
        assert idle.idle_power_watts == pytest.approx(6.654, rel=1e-3)
        assert not any(model.energy for model in idle.models)
        write(root, {"sys/class/hwmon/hwmon1/curr1_input": "3000\n"})
        sent = 0
        while not (energy := [of for model in (await reading()).models for of in model.energy]) or not energy[0].joules:
            await asyncio.gather(*(stub.ModelInfer(expression(b"1 + 1")) for _ in range(10)))
            sent += 10
        assert [of.tier for of in energy] == ["full"]
        assert 0 < energy[0].requests <= sent
        assert [thread.name for thread in threading.enumerate()].count("energy") == 1
    assert "energy" not in [thread.name for thread in threading.enumerate()]
