"""The group ``fewheads language`` with all its commands."""

from __future__ import annotations

from export.experiments.language.cli import compare
from export.experiments.mismatch.cli import mismatch
from export.language.cli import language
from export.language.export_cli import export, export_head
from export.language.finetune_cli import finetune
from export.language.head_cli import head
from export.language.reduce_cli import reduce

for command in (finetune, head, compare, mismatch, reduce, export, export_head):
    language.add_command(command)

__all__ = ["language"]
