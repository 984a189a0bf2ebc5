import json
import shutil

import numpy as np
import pytest
import torch

from edge.bundles.expression import tokenize
from edge.errors import UsageError
from export.models.attention import MultiHeadAttention
from export.papers.calculator.networks import create
from export.papers.calculator.run import calculator
from export.papers.calculator.view.attention import attention_of, transformer_weights
from export.papers.calculator.view.errors import OPERANDS, by_terms, grids, new_expressions
from tests.support.calculators import save_untrained, untrained
from tests.support.task_data import invoke

EXPRESSION = "3 - -4 + 2"
TOKENS = ("3", "-", "-4", "+", "2", *["·"] * 10)


def test_a_grid_has_answers_less_truths_by_row_and_column():
    found = {grid.form: grid.array for grid in grids(lambda tokens: tokens[:, :1])}  # it answers a
    b = np.broadcast_to(np.array(OPERANDS), (21, 21))
    assert list(found) == ["a + b", "a - b", "a + b + 2", "a + b - 2", "a - b + 2", "a - b - 2"]
    for form, errors in found.items():
        np.testing.assert_array_equal(errors, (b if "- b" in form else -b) - {"+ 2": 2, "- 2": -2}.get(form[6:], 0))


def test_expressions_by_length_are_new_and_those_of_their_seed(splits):
    known = {*splits["train"].expressions, *splits["val"].expressions}
    for terms, count in ((1, 10), (2, 200), (3, 300), (8, 300)):
        texts = new_expressions(terms, 300, seed=1)
        assert (len(set(texts)), len(texts)) == (count, count)
        assert not known & set(texts)
        assert {len(text.split()) for text in texts} == {2 * terms - 1}
        assert texts == new_expressions(terms, 300, seed=1) != new_expressions(terms, 300, seed=2)


def test_errors_by_length_have_their_number_and_an_interval():
    measures = by_terms(lambda tokens: np.zeros((len(tokens), 1), np.float32), items=50, seed=0)
    assert [(measure.split, measure.n) for measure in measures] == [
        ("terms/1", 10), *((f"terms/{terms}", 50) for terms in range(2, 9))
    ]  # fmt: skip
    assert measures[0].value == pytest.approx(2.5)  # of -5 to 4
    assert all(measure.interval[0] < measure.value < measure.interval[1] for measure in measures)


@pytest.mark.parametrize("mode", [None, "fixed"])
def test_weights_of_a_transformer_are_those_of_its_forward_pass(mode):
    model = create("calculator-transformer4", 0, **({"adaptive": mode} if mode else {})).eval()
    x, seen = torch.from_numpy(tokenize([EXPRESSION, "1"])), []
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    for attention in attentions:
        if mode:  # scores below one half, so that heads shrink
            torch.nn.init.constant_(attention.scorer.layers[-2].bias, -1.0)
        attention.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0], outputs)))
    with torch.no_grad():
        weights = transformer_weights(model, x)
    assert [tuple(one.shape) for one in weights] == [(2, 8, 16, 16), (2, 8, 16, 16), (2, 8, 1, 16)]
    for attention, weight, (tokens, (output, scores)) in zip(attentions, weights, seen, strict=True):
        heads = weight @ attention.context(tokens, None)[1]
        if mode:
            heads = heads * attention.keep(scores)[:, :, None]
        torch.testing.assert_close(attention.output_proj(heads.transpose(1, 2).flatten(2)), output)


@pytest.mark.parametrize(
    ("name", "keys", "kind"),
    [
        ("calculator-lstm", TOKENS, "softmax"),
        ("calculator-softmax-gate", ("3", "- -4", "+ 2", *["·"] * 5), "softmax"),
        ("calculator-gate", ("3", "- -4", "+ 2", *["·"] * 5), "gate"),
        ("calculator-transformer4", ("Σ", *TOKENS), "softmax"),
    ],
)
def test_attention_belongs_to_tokens_or_terms(name, keys, kind):
    found = attention_of(untrained(name), EXPRESSION)
    assert (found.keys, found.kind) == (keys, kind)
    for layer in map(np.array, found.layers):
        assert layer.shape[2] == len(keys)
        if kind == "softmax":
            np.testing.assert_allclose(layer.sum(axis=2), 1, atol=1e-4)
        if "gate" in name:
            assert not layer[..., 3:].any()
            assert layer[..., :3].all()


def test_the_command_writes_a_view_of_each_run_and_pictures(tmp_path):
    names = ("calculator-fnn2", "calculator-transformer4")
    runs, out = [save_untrained(name, tmp_path / "runs") for name in names], tmp_path / "out"
    views = json.loads(invoke(calculator, "view", *runs, "--out", out, "--items", 5, "--json"))
    assert [(view["run"], view["model"]) for view in views] == [(name, name) for name in names]
    assert views[0]["attention"] is None
    assert len(views[1]["attention"]["layers"]) == 3
    assert [json.loads((out / name / "view.json").read_bytes()) for name in names] == views
    assert views[0]["answer"] == pytest.approx(untrained(names[0]).predict(tokenize([EXPRESSION]))[0, 0])
    both = {"errors.png", "terms.png"}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.png")} == {
        *both,
        *(f"{names[0]}/{picture}" for picture in both),
        *(f"{names[1]}/{picture}" for picture in (*both, "attention.png", "maps.png")),
    }
    looped = shutil.copytree(runs[0], tmp_path / "looped")
    config = json.loads((looped / "config.json").read_text())
    (looped / "config.json").write_text(json.dumps(config | {"model": "looped-linear"}))
    for options, message in (
        ((runs[0], runs[0]), "RUN: got 'calculator-fnn2', expected each name once, because its files go there"),
        ((looped,), "RUN .*looped: got 'looped-linear', expected one of calculator-oracle, "),
        ((runs[0], "--expression", "3 *"), r"--expression: got '3 \*', expected \+ or - at character 3"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(calculator, "view", *options, "--out", out)
