import shutil

import msgspec
import pytest
import safetensors.torch
import torch

from export.calculator.models import MODELS
from export.checkpoint import load, save
from export.errors import CheckpointError
from export.runs import CONFIG, METRICS, WEIGHTS


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "calculator-gate", tmp_path / "calculator-gate")


def edit(path, **changes):
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **changes}))


def change_weights(run, change):
    weights = safetensors.torch.load_file(run / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, run / WEIGHTS)


def test_round_trip(run, tmp_path):
    model, config, metrics = load(run, MODELS)
    save(tmp_path / "deep" / "copy", model, config, metrics)
    again, *rest = load(tmp_path / "deep" / "copy", MODELS)
    assert rest == [config, metrics]
    assert not again.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_config_says_where_the_weights_come_from(run):
    provenance = load(run, MODELS)[1].provenance
    assert provenance.seed == 0
    assert provenance.versions["torch"] == torch.__version__
    assert provenance.created.endswith("+00:00")
    assert "epochs=20" in provenance.trainer


def test_arguments_rebuild_the_model(runs):
    model, config, _ = load(runs / "literal" / "calculator-transformer4", MODELS)
    assert config.arguments == {"adaptive": "literal"}
    assert model.adaptive == "literal"


def test_saving_again_replaces_the_run_and_leaves_nothing_else(run):
    model, config, metrics = load(run, MODELS)
    save(run, model, msgspec.structs.replace(config, model="calculator-gate"), metrics)
    assert sorted(path.name for path in run.iterdir()) == sorted([WEIGHTS, CONFIG, METRICS])
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_something_else_is_not_replaced(run, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(CheckpointError, match=r"photos: got something that is not a run, .* Choose another --out"):
        save(tmp_path / "photos", *load(run, MODELS))
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_unwritable_place(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="expected a writable place"):
        save(tmp_path / "file" / "run", *load(run, MODELS))


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="got nothing there, expected a run directory"):
        load(tmp_path / "none", MODELS)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="got a file, expected a run directory"):
        load(tmp_path / "file", MODELS)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, METRICS])
def test_missing_file(run, name):
    (run / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: got No such file or directory, expected a file"):
        load(run, MODELS)


@pytest.mark.parametrize("name", [CONFIG, METRICS])
@pytest.mark.parametrize("text", ["", "[]", '{"model": 3}'])
def test_malformed_json(run, name, text):
    (run / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name}: got .*, expected the fields of Run"):
        load(run, MODELS)


def test_unknown_model(run):
    edit(run / CONFIG, model="calculator-abacus")
    with pytest.raises(
        CheckpointError, match=r"field model: got 'calculator-abacus', expected one of calculator-oracle"
    ):
        load(run, MODELS)


def test_unknown_arguments(run):
    edit(run / CONFIG, arguments={"heads": 3})
    with pytest.raises(
        CheckpointError, match=r"field arguments: got .*heads.*expected the arguments of calculator-gate"
    ):
        load(run, MODELS)


def test_weights_are_no_safetensors(run):
    (run / WEIGHTS).write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="expected a safetensors file"):
        load(run, MODELS)


def test_wrong_shape(run):
    change_weights(run, lambda weights: weights.update({"value.bias": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"'value.bias': got torch.float32 \[2\], expected torch.float32 \[1\]"):
        load(run, MODELS)


def test_wrong_type(run):
    change_weights(run, lambda weights: weights.update({"value.bias": torch.zeros(1, dtype=torch.float64)}))
    with pytest.raises(CheckpointError, match=r"'value.bias': got torch.float64 \[1\], expected torch.float32 \[1\]"):
        load(run, MODELS)


def test_missing_and_extra_tensors(run):
    change_weights(run, lambda weights: weights.pop("value.bias"))
    with pytest.raises(CheckpointError, match=r"tensor .value.bias.: got no such tensor"):
        load(run, MODELS)
    change_weights(run, lambda weights: weights.update({"value.bias": torch.zeros(1), "extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="'extra': got a tensor that the model has not"):
        load(run, MODELS)


def test_weights_that_are_not_finite(run):
    change_weights(run, lambda weights: weights["value.bias"].fill_(float("nan")))
    with pytest.raises(
        CheckpointError, match=r"'value.bias': got NaN or Inf, expected finite weights. Train the model"
    ):
        load(run, MODELS)
