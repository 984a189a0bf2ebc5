import msgspec
import numpy as np
import pytest
import torch

from export.errors import CheckpointError, PlanError, ReductionError
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape, Transformer
from export.reduce.grid import Grid
from export.reduce.losses import measure_losses
from export.reduce.plan import plan_of
from export.reduce.reduce import apply_plan, reduce_model
from export.reduce.search import choose_shapes
from tests.support.reduction_data import config, inputs, mac_times, model
from tests.support.task_data import same

GRID = Grid(((4, 8), (4, 4), (2, 8), (2, 4), (0, 0)), (48, 24, 8, 0))
TARGET = 1.7


def reduced(classifier, **options):
    times = mac_times(classifier.transformer.config, GRID, 10)
    return reduce_model(classifier, inputs(), TARGET, times=times, **options)


def speedup(plan):
    """Return the speed-up of a plan if every multiplication takes the same time."""
    return mac_times(config(layers=3), GRID, 10).speedup(plan.dense, plan.shapes)


@pytest.fixture(scope="module")
def result():
    return reduced(model(layers=3))


def test_target_is_met_and_the_answers_stay_near(result):
    plan = result.plan
    assert speedup(plan) >= TARGET
    assert plan.dense_macs(10) / plan.macs(10) == pytest.approx(speedup(plan), rel=0.02)
    assert result.model.transformer.config.layers == tuple(layer.shape for layer in plan.layers)
    assert error_of(result.model) < 0.5


def test_reports_have_the_choices_and_the_errors(result):
    for it, layer in zip(result.reports, result.plan.layers, strict=True):
        assert (it.plan, len(layer.heads), len(layer.neurons)) == (layer, layer.shape.num_heads, layer.shape.ffn_dim)
        assert it.measured_feed_forward_error == pytest.approx(it.feed_forward_error, rel=1e-2, abs=1e-6)


def test_the_original_stays_as_it_is():
    original = model(layers=2)
    apply_plan(original, inputs(), plan_of(config(layers=2), [LayerShape(2, 4, 24), None]))
    assert same(original, model(layers=2))


@pytest.mark.parametrize("stop", [2, 5])  # in the losses, and in the layers
def test_an_interrupted_reduction_resumes_to_the_same_bits(result, tmp_path, stop):
    seen = []

    def interrupt(*step):
        seen.append(step)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduced(model(layers=3), state=tmp_path / "state", on_progress=interrupt)
    again = reduced(model(layers=3), state=tmp_path / "state", on_progress=lambda *step: seen.append(step))
    steps = [(stage, n) for stage in ("losses", "layers") for n in (1, 2, 3)]
    assert [step[:2] for step in seen] == steps
    assert (again.plan, again.reports) == (result.plan, result.reports)
    assert same(again.model, result.model)


def test_errors_of_whole_heads_are_predicted_and_those_of_narrow_ones_are_reported():
    plan = plan_of(config(layers=2), [LayerShape(2, 8, 24), LayerShape(2, 4, 24)])
    whole, narrow = apply_plan(model(layers=2), inputs(), plan).reports
    assert whole.measured_attention_error == pytest.approx(whole.attention_error, rel=1e-2)
    assert whole.attention_error > 1e-3
    assert (whole.logits_error, narrow.logits_error > 1e-3) == (0, True)


def test_other_models_and_settings_have_states_of_their_own_and_broken_ones_are_rejected(tmp_path):
    reduced(model(), state=tmp_path)
    reduced(model(seed=1), state=tmp_path)
    assert [len(list(tmp_path.glob(pattern))) for pattern in ("losses-*", "layers-*")] == [2, 2]
    for path in tmp_path.iterdir():
        path.unlink()
    reduced(model(), state=tmp_path)
    for pattern in ("layers-*", "losses*"):
        [state] = tmp_path.glob(pattern)
        state.write_bytes(b"no state")
        with pytest.raises(CheckpointError, match=state.name):
            reduced(model(), state=tmp_path)


class Rows:
    """40 inputs of another kind than a BERT's, of one shape."""

    lengths, targets = np.full(40, 17), np.zeros(40, dtype=np.int64)

    def __init__(self, tensor):
        self.tensor = tensor

    def batch(self, rows):
        targets = torch.from_numpy(self.targets[rows])
        return inputs().batch(rows[:1])._replace(inputs=self.tensor[rows], mask=None, segments=None, targets=targets)


@pytest.mark.parametrize("architecture", ["gpt2", "vit"])
def test_other_architectures(architecture):
    torch.manual_seed(0)
    if architecture == "gpt2":
        classifier, rows = model(architecture="gpt2"), Rows(torch.randint(40, (40, 17)))
    else:
        settings = msgspec.structs.replace(config("vit"), image_size=8, patch_size=2, channels=1)
        classifier, rows = SequenceClassifier(Transformer(settings), 3).eval(), Rows(torch.randn(40, 1, 8, 8))
    shapes = [LayerShape(2, 8, 24), LayerShape(0, 0, 48)]
    smaller = apply_plan(classifier, rows, plan_of(classifier.transformer.config, shapes))
    assert smaller.model.transformer.config.layers == tuple(shapes)
    first, second = smaller.reports
    assert first.measured_attention_error == pytest.approx(first.attention_error, rel=1e-2)
    assert second.plan.heads == ()


def test_weights_that_are_not_finite_are_rejected_first(tmp_path):
    classifier = model()
    with torch.no_grad():
        classifier.transformer.layers[1].feed_forward.up.weight[0, 0] = torch.nan
    message = r"weights transformer.layers.1.feed_forward.up.weight: got NaN or Inf, expected finite numbers"
    with pytest.raises(ReductionError, match=message):
        reduced(classifier, state=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_reduced_model_is_reduced_further(result):
    further = reduced(result.model)
    assert speedup(further.plan) >= TARGET
    for layer, before in zip(further.plan.layers, result.plan.layers, strict=True):
        assert layer.shape.num_heads <= before.shape.num_heads
        assert layer.shape.head_dim <= before.shape.head_dim
        assert layer.shape.ffn_dim <= before.shape.ffn_dim
    assert error_of(further.model) < 1


def test_a_layer_that_is_left_out_is_gone_with_its_normalisations(tmp_path):
    """Of three layers the middle one goes; the last one is reduced on the outputs of the first."""
    original = model(layers=3)
    dense, small = LayerShape(4, 8, 48), LayerShape(2, 8, 24)
    plan = plan_of(original.transformer.config, [dense, None, small])

    def interrupt(*step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_plan(original, inputs(), plan, state=tmp_path, on_progress=interrupt)
    resumed = apply_plan(original, inputs(), plan, state=tmp_path)
    assert [report.number for report in resumed.reports] == [0, 2]
    assert resumed.model.transformer.config.layers == (dense, small)
    shorter = model(layers=3)
    del shorter.transformer.layers[1]
    shorter.transformer.config = msgspec.structs.replace(shorter.transformer.config, layers=(dense, dense))
    expected = apply_plan(shorter, inputs(), plan_of(shorter.transformer.config, [dense, small]))
    assert same(resumed.model, expected.model)
    with pytest.raises(PlanError, match="got no layer, expected one layer at least"):
        plan_of(original.transformer.config, [None] * 3)


def error_of(found):
    """The squared error of a model's outputs for inputs that no calibration has, relative to their variance."""
    batch = inputs(seed=1).batch(np.arange(48))
    with torch.no_grad():
        wanted, outputs = (one(*batch[:3]) for one in (model(layers=3), found))
    return float((outputs - wanted).square().mean() / wanted.var())


def test_whole_layers_are_planned_without_losses_and_reduced(tmp_path):
    stages = set()
    found = reduced(model(layers=3), strategy="spread", state=tmp_path, on_progress=lambda stage, *_: stages.add(stage))
    assert (found.plan.kept, found.plan.shapes) == ((2,), (LayerShape(4, 8, 48),))
    assert (stages, {path.name.partition("-")[0] for path in tmp_path.iterdir()}) == ({"layers"}, {"layers"})


def test_losses_are_measured_on_other_inputs_than_the_weights(result):
    other = inputs(seed=5)  # by which another plan is the best
    found = reduced(model(layers=3), loss_rows=other)
    settings = config(layers=3)
    times = mac_times(settings, GRID, 10)
    wanted = choose_shapes(settings.layers, measure_losses(model(layers=3), other, GRID), times, TARGET)
    assert found.plan.shapes == tuple(wanted) != result.plan.shapes
    assert same(found.model, apply_plan(model(layers=3), inputs(), plan_of(settings, wanted)).model)
