"""The group ``fewheads language`` with all its commands."""

from __future__ import annotations

from export.commands.language import language
from export.commands.language_export import export
from export.commands.language_finetune import finetune
from export.commands.language_reduce import reduce
from export.papers.backward.run import compare, export_head, head, mismatch

for command in (finetune, head, compare, mismatch, reduce, export, export_head):
    language.add_command(command)

__all__ = ["language"]
