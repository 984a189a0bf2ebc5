"""All tasks by name, and those on own data. A new kind of task is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from edge.errors import Raw, UsageError
from export.finetune import IMPORTED, glue
from export.finetune.image_tasks import DIGITS, IMAGENET, MNIST
from export.finetune.imported import ImportedTask
from export.finetune.models import OpenedModel
from export.finetune.own_texts import own_task
from export.finetune.questions import SQUAD
from export.finetune.task import Task

TASKS: Mapping[str, Task] = {**glue.TASKS, **{task.name: task for task in (SQUAD, MNIST, DIGITS, IMAGENET)}}


def task_of(found: OpenedModel, directory: object) -> Task:
    """Return the task that a model was fine-tuned on; of an imported model, to answer as it does.

    Args:
        directory: of the model, for the message.
    """
    if found.config is not None and found.config.own_data is not None:
        return own_task(found.config.own_data)
    if found.architecture is not None and found.architecture.task in IMPORTED:
        assert found.head is not None, "a run has a head"
        return ImportedTask(found.architecture, found.head)
    if found.architecture is None or found.architecture.task not in TASKS:
        fix = "Fine-tune the model first: fewheads finetune TASK --model MODEL."
        given = Raw("a model without a task")
        raise UsageError(
            f"{directory}", given=given, expected=f"a run on one of {', '.join(TASKS)}, or on own data", fix=fix
        )
    return TASKS[found.architecture.task]
