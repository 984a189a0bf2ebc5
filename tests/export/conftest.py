import functools
import gc
import shutil

import pytest
import torch
import torch._dynamo.config
from torch.onnx._internal.exporter import _registration

from export.cli.finetune import finetune
from export.data import expressions as data
from export.papers.calculator.train import train_run
from tests.support.calculators import export_untrained
from tests.support.kept_exports import KeptExports
from tests.support.task_data import encoded, invoke, make_sentiment, make_transformer, write_model, write_sst2


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def x():
    """Tokens of an attention with a width of 16, [3, 6, 16]."""
    return torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padding():
    """Their mask, [3, 6]."""
    return torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2, [1.0] + [0.0] * 5])


@pytest.fixture(autouse=True, scope="session")
def _fast_exports():
    """Let torch trace each structure and parse its operators once, without a cache that costs more than it saves."""
    registry = _registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        patch.setattr(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib)))
        patch.setattr(torch.onnx, "export", KeptExports(torch.onnx.export))
        yield


@pytest.fixture(autouse=True, scope="session")
def _rare_collections():
    """Let Python look for garbage more rarely, because torch's exporter makes many objects that stay."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


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
    return root


@pytest.fixture(scope="session")
def calculator(tmp_path_factory):
    """Return the bundle of an untrained calculator by its name; each is exported once, where it is first needed."""
    root = tmp_path_factory.mktemp("calculators")
    return functools.cache(lambda name: export_untrained(name, root))


@pytest.fixture(scope="session")
def train():
    return encoded(make_sentiment(320))  # 10 batches of 32


@pytest.fixture(scope="session")
def holdout():
    return encoded(make_sentiment(64, seed=1))


@pytest.fixture(scope="session")
def sst2(tmp_path_factory):
    """A directory with data of SST-2, a model of two layers, a smaller one of one layer, and a run of the first."""
    root = tmp_path_factory.mktemp("sst2")
    write_sst2(root)
    write_model(root / "model", make_transformer())
    write_model(root / "small", make_transformer(layers=1, seed=1))
    options = ("--data-dir", root, "--lr", 2e-2, "--max-length", 32)
    invoke(finetune, "SST-2", "--model", root / "model", "--out", root, *options, "--final")
    return root


@pytest.fixture(scope="module")
def place(sst2, tmp_path_factory):
    """A copy of that directory, for the tests of one module."""
    return shutil.copytree(sst2, tmp_path_factory.mktemp("place") / "copy")
