"""The group ``fewheads language`` with all its commands."""

from __future__ import annotations

from export.experiments.language.cli import compare
from export.language.cli import language
from export.language.head_cli import head

language.add_command(head)
language.add_command(compare)

__all__ = ["language"]
