"""The device that a training runs on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from edge.errors import Raw, UsageError
from export.training.recipe import Precision

DeviceName = Literal["auto", "cpu", "cuda"]


def device_of(name: DeviceName) -> torch.device:
    """Return the device of ``--device``; ``auto`` is the GPU if torch has one.

    Raises:
        UsageError: torch has no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        expected = "a GPU that torch can use"
        fix = "Give --device cpu, or install a torch that is built for this machine's CUDA."
        raise UsageError("--device", given=Raw("cuda, and torch finds no GPU"), expected=expected, fix=fix)
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def multiplying_in(precision: Precision, device: torch.device | None = None) -> torch.autocast:
    """Return a context in which matrix products on the device (CPU if None) have a precision."""
    kind = "cpu" if device is None else device.type
    return torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16")
