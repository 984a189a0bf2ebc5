"""A workstation keeps after an update: runs with their outputs and measures, and commands with their options."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.compatibility.changes import announced, commands, facts, help_of
from tests.compatibility.paths import DATA, program, run_outputs

RUNS = DATA / "trained"
#: Runs whose outputs for a few inputs are in ``runs.npz``; those of language models are measured instead.
WITH_OUTPUTS = sorted(path.name for path in RUNS.iterdir() if path.name not in ("language", "head"))
EVALUATE = ("language", "evaluate", RUNS / "language", "--data", "calculator:in_range", "--limit", 5, "--max-tokens", 4)


def shown(*arguments):
    done = CliRunner().invoke(program(), [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def same(found, expected):
    """Check that a JSON document has all of another one; numbers may differ by rounding."""
    if isinstance(expected, dict):
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-6) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_a_run_computes_the_same_outputs(name):
    with np.load(DATA / "runs.npz") as arrays:
        kept = {key: array for key, array in arrays.items() if key.startswith(f"{name}/")}
    inputs = {key.split("/")[2]: torch.from_numpy(array) for key, array in kept.items() if "/inputs/" in key}
    expected = [array for key, array in kept.items() if "/outputs/" in key]
    for ours, theirs in zip(run_outputs(RUNS / name, inputs), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("finetuned", ("report", RUNS / "finetuned", "--data-dir", DATA / "task_data")),
        ("reduced", ("report", RUNS / "reduced", "--data-dir", DATA / "task_data")),
        ("language", EVALUATE),
        ("head", (*EVALUATE, "--head", RUNS / "head")),
    ],
)
def test_a_run_has_the_same_measures(name, arguments):
    found = shown(*arguments)
    same(found if name in WITH_OUTPUTS else found["measures"], json.loads((DATA / "measures.json").read_text())[name])


def test_a_run_is_exported_as_the_same_bundle(tmp_path):
    shown("export", RUNS / "calculator-gate", "--repository", tmp_path)
    name = Path("calculator-gate-1", "golden.npz")
    with np.load(tmp_path / name) as ours, np.load(DATA / "bundles" / name) as theirs:
        assert ours.keys() == theirs.keys()
        for key, expected in theirs.items():
            if expected.dtype.kind == "f":
                np.testing.assert_allclose(ours[key], expected, rtol=1e-5, atol=1e-5)
            else:
                assert ours[key].tolist() == expected.tolist()


def test_commands_and_options_go_or_change_only_as_the_changelog_says(monkeypatch):
    monkeypatch.delenv("FEWHEADS_DATA", raising=False)
    found = {name: facts(help_of(name, command)) for name, command in commands(program())}
    unannounced = []
    for name, text in json.loads((DATA / "help.json").read_text()).items():
        if name not in found:
            unannounced += [] if announced(name) else [f"{name} is gone"]
            continue
        for option, expected in facts(text).items():
            if not expected <= found[name].get(option, set()) and not announced(name.removeprefix("fewheads "), option):
                unannounced.append(f"{name} {option}: {sorted(expected)}, now {sorted(found[name].get(option, set()))}")
    assert not unannounced, f"CHANGELOG.md's Unreleased has to name them in backticks: {unannounced}"
