"""The trials of a search: proposed by Optuna's TPE, trained, and kept in a journal, from which the search resumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.errors import Raw, UsageError
from export.errors import CheckpointError, TrainingError
from export.papers.calculator.data import load
from export.papers.calculator.networks import create
from export.papers.calculator.search.records import TrialRecord
from export.papers.calculator.search.space import propose
from export.papers.calculator.train import CalculatorObjective
from export.training.objective import Observer
from export.training.trainer import train

if TYPE_CHECKING:
    import optuna

JOURNAL = "trials.log"


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
            raise UsageError("calculator search", given=Raw("no optuna"), expected="optuna", fix=fix) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._model, self._seed, self._optuna = model, seed, optuna
        self._splits = load()
        path = out / JOURNAL
        try:
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=model,
                direction="minimize",
                # None: the networks that end best here learn slowly at first, and would be pruned.
                pruner=optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
        except (OSError, ValueError, KeyError) as error:
            expected, fix = "a journal of trials", "Delete it to begin the search again, or give another --out."
            raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None

    @property
    def trials(self) -> list[TrialRecord]:
        """The finished trials, in their order."""
        return [msgspec.convert(trial.user_attrs["record"], TrialRecord) for trial in self._finished()]

    def better(self) -> list[TrialRecord]:
        """Return the trials that did not diverge, the best first.

        Raises:
            TrainingError: there is none.
        """
        complete = [trial for trial in self.trials if trial.value is not None]
        if not complete:
            given, fix = Raw(f"none of {len(self.trials)}"), "Give more --trials."
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
            if record.value is None:
                self._study.tell(trial, state=states.PRUNED)  # worse than any value
            else:
                self._study.tell(trial, record.value)

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
        trained = None
        with suppress(TrainingError):  # it diverged
            trained = train(objective, recipe, seed=self._seed, observer=watch)
        return TrialRecord(
            number=number,
            value=-max(trained.scores) if trained else None,
            parameters=model.parameter_count,
            epochs=len(trained.scores) if trained else 0,
            seconds=trained.seconds if trained else 0.0,
            values=trial.params,
            proposal=proposal,
        )
