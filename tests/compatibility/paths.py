"""All names inside the product that these tests use, so that a rename changes this file alone."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Written by commit 40db5dbf, whose formats, commands, metrics and names later versions keep. No script writes it
#: again: it would write what a later commit does.
DATA = Path(__file__).parent / "data"
BUNDLES = sorted((DATA / "bundles").iterdir())
OLDER_BUNDLES = sorted((ROOT / "tests" / "data" / "version_1" / "bundles").iterdir())


def public(module, name):
    """Return a name that users import, such as ``edge.client`` and ``Client``."""
    return getattr(importlib.import_module(module), name)


def program():
    return public("edge.__main__", "cli")


def telemetry_messages():
    return public("edge.pb.telemetry_pb2", "DESCRIPTOR")


def board_families(root):
    from edge.instruments.board import read_board
    from edge.instruments.memory import MemorySampler
    from edge.instruments.sensors import Sensors
    from edge.telemetry.board import board_metrics, power_metrics

    yield from board_metrics(MemorySampler(root).sample(), Sensors(root).sample())
    yield from power_metrics(read_board(root), 5.0)


def run_outputs(run, inputs):
    """Return the output arrays of a run's model, in torch, for inputs as tensors."""
    import torch

    with torch.no_grad():
        if run.name.startswith("looped"):
            from export.papers.looped.model import trajectory

            model = _load(run, "prompt-transformer", public("export.papers.looped.train", "create"))
            path = trajectory(model, inputs["xs"], inputs["ys"], 3)
            return [*path.predictions, *path.residuals]
        if run.name.startswith("calculator"):
            if run.name == "calculator-stack":
                create = public("export.papers.calculator.stack.machine", "StackMachine")
            else:
                create = public("export.papers.calculator.networks", "NETWORKS")[run.name]
            model = _load(run, run.name, create)
        else:
            from export.finetune.models import open_model

            model = open_model(run).head
        outputs = model(*(tensor for name, tensor in inputs.items() if name != "token_offsets"))
    return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else [outputs])]


def _load(run, name, create):
    from export.training.checkpoint import load

    return load(run, {name: create})[0]
