"""The group ``fewheads language`` with all of its commands."""

from __future__ import annotations

from export.language.cli import language
from export.language.export_cli import export

__all__ = ["export", "language"]
