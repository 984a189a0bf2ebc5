import pytest
import torch

from export.calculator import data
from export.calculator.run import train_run


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def splits():
    return data.load()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run directories of small but real runs, by the model's name."""
    root = tmp_path_factory.mktemp("runs")
    epochs = {"calculator-gate": 20, "calculator-fnn2": 3}
    for name in ("calculator-oracle", *epochs):
        train_run(name, root / name, seed=0, epochs=epochs.get(name))
    for mode in ("fixed", "literal"):
        train_run("calculator-transformer4", root / mode / "calculator-transformer4", seed=0, epochs=1, adaptive=mode)
    return root
