"""Samples of values that the kernel does not accumulate."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import Final

from edge.instruments.energy import EnergyMeter
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors

log = logging.getLogger(__name__)

_SAMPLE_SECONDS: Final = 1.0


async def watch_board(memory: MemorySampler, sensors: Sensors, energy: EnergyMeter | None) -> None:
    """Measure energy, and sample load and peak memory for all readers every second, until cancelled."""
    failing = False
    with energy or nullcontext():
        while True:
            try:
                memory.observe()
                sensors.observe()
                failing = False
            except Exception:  # the next sample may succeed
                if not failing:
                    log.exception("memory and load cannot be sampled")
                failing = True
            await asyncio.sleep(_SAMPLE_SECONDS)
