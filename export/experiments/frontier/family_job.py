"""A family as one job: its trainings and its answers. Its files are timed later, when nothing else runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from export.papers.experiment import keep_settings
from export.papers.frontier.answers import answer
from export.papers.frontier.family import family_inputs, stages
from export.papers.frontier.settings import FamilySettings
from export.training.watch import watching


def train_family(family: FamilySettings, model: Path, data_dir: Path, directory: Path) -> None:
    """Make the missing runs of a family, and its answers.

    Args:
        model: a Hugging Face directory.
        directory: of the family; an unfinished one with these settings resumes.
    """
    keep_settings(directory, family, unused=family.counts)
    inputs = family_inputs(family, model, data_dir)
    for stage in stages(family, inputs, directory):
        with watching(f"{directory.name}/{stage.name}") as watch:
            stage.make(watch)
    with watching(f"{directory.name}/answers") as watch:
        answer(family, inputs, directory, partial(watch.on_part, "runs"))
