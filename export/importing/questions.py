"""Fine-tuned runs on SQuAD, which become bundles as imported models that answer questions do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from export.data.examples import Examples
from export.data.squad import read_splits
from export.finetune.imported import ImportedTask
from export.finetune.models import OpenedModel
from export.finetune.questions import SQUAD


class SquadQuestions(ImportedTask, frozen=True):
    """The task to answer as a run on SQuAD, on the questions that it may learn from."""

    @property
    def origin(self) -> str:
        """See :class:`export.finetune.task.Task`."""
        return SQUAD.origin

    def items(self, data: Path) -> Examples:
        """Return questions with their contexts from a data directory, without targets."""
        texts = tuple((entry.question, entry.context) for entry in read_splits(data / "squad")[0])
        return Examples(texts, np.zeros(len(texts), np.int64))


def task_of(found: OpenedModel) -> ImportedTask:
    """Return the task to answer as a run does, which was imported or fine-tuned on SQuAD."""
    assert found.architecture is not None
    assert found.head is not None
    is_squad = found.config is not None and found.config.arguments["task"] == SQUAD.name
    return (SquadQuestions if is_squad else ImportedTask)(found.architecture, found.head)


def as_imported(found: OpenedModel) -> OpenedModel:
    """Return a run on SQuAD described as an imported model that answers questions, and any other one as it is."""
    if found.architecture is None or found.architecture.task != SQUAD.name:
        return found
    described = msgspec.structs.replace(found.architecture, task="question-answering", pair=True)
    return msgspec.structs.replace(found, architecture=described)
