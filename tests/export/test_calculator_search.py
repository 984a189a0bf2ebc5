"""The search for the shape of a calculator, with real trials of few epochs."""

import multiprocessing
import os
import sys

import msgspec
import numpy as np
import pytest
import torch

from edge.errors import UsageError
from export.errors import CheckpointError, TrainingError
from export.papers.calculator.bundle import export_run
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.run import calculator
from export.papers.calculator.search import space
from export.papers.calculator.search.space import SPACES, propose
from export.papers.calculator.search.study import JOURNAL, Search
from export.training.checkpoint import load
from export.training.objective import SILENT, Observer
from export.training.runs import read_config
from tests.support.task_data import invoke

optuna = pytest.importorskip("optuna")

MODEL, SMALL = "calculator-fnn2", "calculator-lstm"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(space, "EPOCHS", 2)


def values(search):
    return [(trial.number, trial.value, trial.values) for trial in search.trials]


class Killed(Observer):
    """Ends the process in the middle of a trial."""

    def on_epoch(self, epoch):
        os._exit(9)


def search_until_killed(out):
    torch.set_num_threads(1)  # as in this process: sums of another number of threads round otherwise
    space.EPOCHS = 1
    Search(SMALL, out, seed=3).run(4, lambda number: Killed() if number == 2 else SILENT)


def test_a_killed_search_goes_on_with_the_trials_of_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "EPOCHS", 1)
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    process = multiprocessing.get_context("spawn").Process(target=search_until_killed, args=(tmp_path / "killed",))
    process.start()
    process.join()
    assert process.exitcode == 9
    resumed = Search(SMALL, tmp_path / "killed", seed=3)
    assert [number for number, *_ in values(resumed)] == [0, 1]
    resumed.run(4, lambda number: SILENT)
    whole = Search(SMALL, tmp_path / "whole", seed=3)
    whole.run(4, lambda number: SILENT)
    assert values(resumed) == values(whole)
    assert len(values(whole)) == 4
    other = Search(SMALL, tmp_path, seed=4)
    other.run(1, lambda number: SILENT)
    assert other.trials[0].values != whole.trials[0].values


def test_the_best_trial_becomes_a_run_that_can_be_exported(tmp_path, splits):
    arguments = ("search", SMALL, "--out", tmp_path / "out", "--json")
    found = msgspec.json.decode(invoke(calculator, *arguments, "--trials", 3))
    trials = msgspec.json.decode((tmp_path / "out/trials.json").read_bytes())
    assert found == msgspec.json.decode((tmp_path / "out/best.json").read_bytes())
    assert found["best"]["value"] == min(trial["value"] for trial in trials)
    assert (tmp_path / "out/trials.png").read_bytes().startswith(b"\x89PNG")
    run = tmp_path / "out" / SMALL
    assert read_config(run).arguments == found["best"]["proposal"]["arguments"]
    assert found["runs"][SMALL]["parameters"] == found["best"]["parameters"]
    errors = load(run, NETWORKS)[0].predict(splits["val"].tokens)[:, 0] - splits["val"].truth
    assert np.square(errors).mean() == pytest.approx(found["best"]["value"], rel=1e-5)
    assert export_run(run, tmp_path / "repository").bundle.endswith(f"{SMALL}-1")
    more = msgspec.json.decode(invoke(calculator, *arguments, "--trials", 4))
    assert more["trials"] == 4
    assert msgspec.json.decode((tmp_path / "out/trials.json").read_bytes())[:3] == trials
    with pytest.raises(UsageError, match="got seed 0, expected seed 1"):
        invoke(calculator, *arguments, "--seed", 1)


@pytest.mark.parametrize("model", SPACES)
def test_every_space_proposes_networks_that_train(model, tmp_path, monkeypatch, splits):
    monkeypatch.setattr(space, "EPOCHS", 1)
    search = Search(model, tmp_path, seed=0)
    search.run(1, lambda number: SILENT)
    (trial,) = search.trials
    assert trial.value < (splits["val"].truth ** 2).mean() * 2
    assert trial.epochs == 1
    assert trial.parameters > 0


def test_the_papers_space_has_its_bounds():
    class Most:
        def suggest_int(self, name, low, high, **options):
            assert low == 1
            return high

        def suggest_categorical(self, name, choices):
            return choices[-1]

    proposal = propose(MODEL, Most())
    assert proposal.arguments == {"units": [512] * 16, "dropout": 0.1}
    assert proposal.recipe.peak_learning_rate == 1e-3
    assert SPACES[MODEL].trials == 100


def test_a_search_without_a_usable_trial_says_so(tmp_path):
    with pytest.raises(TrainingError, match=r"got none of 0, expected one or more\. Give more --trials"):
        Search(SMALL, tmp_path, seed=0).better()


def test_a_malformed_journal_and_a_missing_package_are_explained(tmp_path, monkeypatch):
    (tmp_path / JOURNAL).write_bytes(b"{}\n{}\n")
    with pytest.raises(CheckpointError, match=r"trials.log: got .* expected a journal of trials\. Delete it"):
        Search(MODEL, tmp_path, seed=0)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        UsageError, match=r"got no optuna, expected optuna\. Install it: pip install 'fewheads\[search\]'"
    ):
        Search(MODEL, tmp_path, seed=0)
