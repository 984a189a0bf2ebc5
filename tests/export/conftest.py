import shutil

import pytest
import torch

from export.calculator import data
from export.calculator.train import train_run
from export.tasks.cli import finetune
from tests.support.task_data import invoke, make_transformer, write_model, write_sst2


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def splits():
    return data.load()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run directories of small but real calculators, by the model's name."""
    root = tmp_path_factory.mktemp("runs")
    epochs = {"calculator-gate": 20, "calculator-fnn2": 3}
    for name in ("calculator-oracle", *epochs):
        train_run(name, root / name, seed=0, epochs=epochs.get(name))
    for mode in ("fixed", "literal"):
        train_run("calculator-transformer4", root / mode / "calculator-transformer4", seed=0, epochs=1, adaptive=mode)
    return root


@pytest.fixture(scope="session")
def sst2(tmp_path_factory):
    """A directory with data of SST-2, a model of two layers, a smaller one of one layer, and a run of the first."""
    root = tmp_path_factory.mktemp("sst2")
    write_sst2(root)
    write_model(root / "model", make_transformer())
    write_model(root / "small", make_transformer(layers=1, seed=1))
    options = ("--data-dir", root, "--lr", 2e-2, "--max-length", 32)
    invoke(finetune, "SST-2", "--model", root / "model", "--out", root, *options)
    return root


@pytest.fixture(scope="module")
def place(sst2, tmp_path_factory):
    """A copy of that directory, for the tests of one module."""
    return shutil.copytree(sst2, tmp_path_factory.mktemp("place") / "copy")
