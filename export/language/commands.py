"""The group ``fewheads language`` with all its commands."""

from __future__ import annotations

from export.language.cli import language
from export.language.export_cli import export
from export.language.finetune_cli import finetune
from export.language.reduce_cli import reduce
from export.papers.backward.run import compare, export_head, head, mismatch

for command in (finetune, head, compare, mismatch, reduce, export, export_head):
    language.add_command(command)

__all__ = ["language"]
