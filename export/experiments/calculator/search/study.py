"""The trials of a search: proposed by Optuna's TPE, trained, pruned, and kept in a journal, from which it resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.errors import Literally, UsageError
from export.calculator.data import load
from export.calculator.networks import create
from export.calculator.train import CalculatorObjective
from export.errors import CheckpointError, TrainingError
from export.experiments.calculator.search.records import State, TrialRecord
from export.experiments.calculator.search.space import propose
from export.training.observer import Epoch, Observer, Step
from export.training.trainer import train

if TYPE_CHECKING:
    import optuna

JOURNAL = "trials.log"
#: Of the median pruner: trials before the first one that is pruned, and epochs before a trial may be.
_FIRST_TRIALS, _FIRST_EPOCHS = 8, 10


class Search:
    """The search for a model in a directory.

    The proposal for a trial depends on the seed and on the finished trials alone, so that a search that was killed goes
    on as if it had not been. What a killed trial had computed is lost.

    Args:
        seed: of the proposals, of weights and of the order of items.

    Raises:
        UsageError: Optuna is not installed.
        CheckpointError: the journal is malformed.
    """

    def __init__(self, model: str, out: Path, seed: int) -> None:
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            fix = "Install it: pip install 'fewheads[search]'."
            raise UsageError("calculator search", given=Literally("no optuna"), expected="optuna", fix=fix) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._model, self._seed, self._optuna = model, seed, optuna
        self._splits = load()
        path = out / JOURNAL
        try:
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=model,
                direction="minimize",
                pruner=optuna.pruners.MedianPruner(_FIRST_TRIALS, _FIRST_EPOCHS),
                load_if_exists=True,
            )
        except (OSError, ValueError, KeyError) as error:
            expected, fix = "a journal of trials", "Delete it to begin the search again, or give another --out."
            raise CheckpointError(f"{path}", given=Literally(error), expected=expected, fix=fix) from None

    @property
    def trials(self) -> list[TrialRecord]:
        """The finished trials, in their order."""
        return [msgspec.convert(trial.user_attrs["record"], TrialRecord) for trial in self._finished()]

    def better(self) -> list[TrialRecord]:
        """Return the trials that were not pruned, the best first.

        Raises:
            TrainingError: there is none.
        """
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        if not complete:
            given, fix = Literally(f"none of {len(self.trials)}"), "Give more --trials."
            raise TrainingError("trials that did not diverge", given=given, expected="one or more", fix=fix)
        return sorted(complete, key=lambda trial: trial.value or 0.0)

    def run(self, trials: int, before: Callable[[int], Observer]) -> None:
        """Run trials until so many are finished; ``before`` is called with the number of each."""
        states = self._optuna.trial.TrialState
        for killed in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self._study.tell(killed.number, state=states.FAIL)
        for number in range(len(self._finished()), trials):
            seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            trial = self._study.ask()
            record = self._trained(number, trial, before(number))
            trial.set_user_attr("record", msgspec.to_builtins(record))
            if record.state == "complete":
                self._study.tell(trial, record.value)
            else:
                self._study.tell(trial, state=states.PRUNED)

    def _finished(self) -> list[optuna.trial.FrozenTrial]:
        states = self._optuna.trial.TrialState
        return self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))

    def _trained(self, number: int, trial: optuna.Trial, watch: Observer) -> TrialRecord:
        proposal = propose(self._model, trial)
        model = create(self._model, self._seed, **proposal.arguments)
        recipe = proposal.recipe
        objective = CalculatorObjective(
            model, self._splits["train"], self._splits["val"], seed=self._seed, batch_size=recipe.batch_size
        )
        reporter = _Reporter(trial, watch, self._optuna.TrialPruned)
        started = time.perf_counter()
        state: State = "complete"
        try:
            train(objective, recipe, seed=self._seed, observer=reporter)
        except self._optuna.TrialPruned:
            state = "pruned"
        except TrainingError:
            state = "diverged"
        return TrialRecord(
            number=number,
            state=state,
            value=reporter.least if reporter.epochs else None,
            parameters=model.parameter_count,
            epochs=reporter.epochs,
            seconds=time.perf_counter() - started,
            values=trial.params,
            proposal=proposal,
        )


class _Reporter(Observer):
    """Reports each epoch's error to a trial, which may be pruned there, and passes everything on."""

    def __init__(self, trial: optuna.Trial, watch: Observer, pruned: type[Exception]) -> None:
        self._trial, self._watch, self._pruned = trial, watch, pruned
        self.epochs, self.least = 0, math.inf

    def on_step(self, step: Step) -> None:
        self._watch.on_step(step)

    def on_epoch(self, epoch: Epoch) -> None:
        self._watch.on_epoch(epoch)
        self.epochs = epoch.number
        self.least = min(self.least, -epoch.score.value)
        self._trial.report(-epoch.score.value, epoch.number)
        if self._trial.should_prune():
            raise self._pruned
