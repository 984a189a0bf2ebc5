"""Runs and bundles of calculators without training."""

from pathlib import Path

import pytest
import torch

from export.bundle.exportable import export_bundle
from export.papers.calculator.bundle import SumCalculator
from export.papers.calculator.networks import create
from export.papers.calculator.specs import NAMES
from export.training.checkpoint import save
from export.training.provenance import provenance
from export.training.runs import RunConfig, RunMetrics

#: Their export takes a minute and more.
LARGE = ("calculator-transformer5", "calculator-transformer0")
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
EACH = [pytest.param(name, marks=SLOW if name in LARGE else ()) for name in NAMES]


def untrained(name):
    """Return a network with random biases and slopes, too, so that their places in the graph matter."""
    model = create(name, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def save_untrained(name, directory):
    """Write such a network as the run ``directory/NAME``, and return it."""
    run, model = directory / name, untrained(name)
    config = RunConfig(name, {}, provenance(trainer="none", data="none", seed=0))
    save(run, model, config, RunMetrics(model.parameter_count, 0, 0, 0.0, ()))
    return run


def export_untrained(name, directory, on_rows=None):
    """Write such a run into ``directory/runs``, and return its bundle in ``directory/repository``, or with measures."""
    model = SumCalculator(save_untrained(name, directory / "runs"))
    return Path(export_bundle(model, directory / "repository", on_rows=on_rows).bundle)
