import re
import shutil

import msgspec
import pytest
import safetensors.torch
import torch

from export.errors import CheckpointError
from export.papers.calculator.networks import NETWORKS
from export.training.checkpoint import load, save
from export.training.runs import CARD, CONFIG, METRICS, WEIGHTS


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "calculator-gate", tmp_path / "calculator-gate")


def test_a_run_is_read_as_it_was_written_and_replaced_whole(run, tmp_path):
    model, config, metrics = load(run, NETWORKS)
    for directory in (tmp_path / "deep" / "copy", run):
        save(directory, model, config, metrics)
        again, *rest = load(directory, NETWORKS)
        assert rest == [config, metrics]
        assert not again.training
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
        assert sorted(path.name for path in directory.iterdir()) == sorted([CARD, CONFIG, METRICS, WEIGHTS])
        assert not [path for path in directory.parent.iterdir() if path.name.startswith(".")]
    assert (config.provenance.seed, config.provenance.versions["torch"]) == (0, torch.__version__)
    assert config.provenance.created.endswith("+00:00")
    assert "epochs=20" in config.provenance.trainer
    assert config.precision == "fp32"


def test_a_run_replaces_nothing_else(run, tmp_path):
    loaded = load(run, NETWORKS)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(CheckpointError, match=r"photos: got something that is not a run, .* Choose another --out"):
        save(tmp_path / "photos", *loaded)
    with pytest.raises(CheckpointError, match="expected a writable place"):
        save(tmp_path / "photos" / "cat.jpg" / "run", *loaded)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b""


def configured(**changes):
    def change(run):
        fields = msgspec.json.decode((run / CONFIG).read_bytes())
        (run / CONFIG).write_bytes(msgspec.json.encode({**fields, **changes}))

    return change


def weighted(**changes):
    """Replace tensors of a run by name; None removes one."""

    def change(run):
        weights = {**safetensors.torch.load_file(run / WEIGHTS), **changes}
        safetensors.torch.save_file({name: t for name, t in weights.items() if t is not None}, run / WEIGHTS)

    return change


def written(name, data):
    """Write a file of a run; None deletes it."""
    return lambda run: (run / name).unlink() if data is None else (run / name).write_bytes(data)


BIAS = "value.bias"
BROKEN = [
    (shutil.rmtree, "got nothing there, expected a run directory"),
    (lambda run: (shutil.rmtree(run), run.touch()), "got a file, expected a run directory"),
    *((written(n, None), f"{n}: got No such file or directory, expected a file") for n in (WEIGHTS, METRICS)),
    (written(CONFIG, None), f"run .*: got a directory without {CONFIG}, expected a run directory"),
    (written(CONFIG, b""), f"{CONFIG}: got .*, expected the fields of Run"),
    (written(METRICS, b'{"model": 3}'), f"{METRICS}: got .*, expected the fields of Run"),
    (configured(model="calculator-abacus"), "field model: got 'calculator-abacus', expected one of calculator-oracle"),
    (configured(arguments={"heads": 3}), "field arguments: got .*heads.*expected the arguments of calculator-gate"),
    (written(WEIGHTS, b"no weights"), "expected a safetensors file"),
    (weighted(**{BIAS: torch.zeros(2)}), rf"'{BIAS}': got torch.float32 \[2\], expected torch.float32 \[1\]"),
    (weighted(**{BIAS: torch.zeros(1).double()}), rf"'{BIAS}': got torch.float64 \[1\], expected torch.float32 \[1\]"),
    (weighted(**{BIAS: None}), f"tensor '{BIAS}': got no such tensor"),
    (weighted(extra=torch.zeros(1)), "'extra': got a tensor that the model lacks"),
    (weighted(**{BIAS: torch.tensor([torch.nan])}), f"'{BIAS}': got NaN or Inf, expected finite weights"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[re.sub(r"\W+", "-", message) for _, message in BROKEN])
def test_broken_runs_are_rejected(run, damage, message):
    damage(run)
    with pytest.raises(CheckpointError, match=message):
        load(run, NETWORKS)
