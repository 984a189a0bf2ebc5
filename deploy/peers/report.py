"""From what was measured to tables: medians over the repetitions, and ratios to this server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from recipes import OURS

Record = dict[str, Any]
_START = ("ready_s", "rss_mb", "pss_mb", "processes")
_CELL = ("p50_us", "p99_us", "per_second", "cpu_us", "foreign_cores")
#: Cores that others may take while a cell is measured. Cells with more are left out where there are quieter ones.
_QUIET = 0.2


def summarise(records: list[Record], machine: dict[str, str]) -> Record:
    """Return medians of all records that describe the same thing; a ratio is that of p50 to this server's."""
    starts = _medians([r for r in records if "ready_s" in r], ("server", "version"), _START)
    cells = _medians([r for r in records if "p50_us" in r], ("model", "client", "concurrency", "server"), _CELL)
    ours = {_place(cell): cell["p50_us"] for cell in cells if cell["server"] == OURS}
    for cell in cells:
        base = ours.get(_place(cell))
        cell["ratio"] = cell["p50_us"] / base if base else None
    return {"days": sorted({r["day"] for r in records}), "machine": machine, "starts": starts, "cells": cells}


def _place(cell: Record) -> tuple[Any, ...]:
    return cell["model"], cell["client"], cell["concurrency"]


def _medians(records: list[Record], keys: tuple[str, ...], fields: tuple[str, ...]) -> list[Record]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in keys)].append(record)
    for group, found in groups.items():
        quiet = [record for record in found if record.get("foreign_cores", 0) <= _QUIET]
        groups[group] = quiet or [min(found, key=lambda record: record["foreign_cores"])]
    return [
        {**dict(zip(keys, group, strict=True)), "repetitions": len(found)}
        | {field: median(record[field] for record in found) for field in fields}
        for group, found in groups.items()
    ]


def markdown(results: Record) -> str:
    """Return the tables."""
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    noisy = f"* measured while others took more than {_QUIET:g} cores."
    lines = [f"Measured {', '.join(results['days'])}; {machine}. {noisy}", ""]
    lines += _table(
        ["server", "version", "ready s", "processes", "idle RSS MB", "idle PSS MB", "repetitions"],
        (
            [
                start["server"],
                start["version"],
                f"{start['ready_s']:.2f}",
                f"{start['processes']:.0f}",
                f"{start['rss_mb']:.0f}",
                f"{start['pss_mb']:.0f}",
                str(start["repetitions"]),
            ]
            for start in results["starts"]
        ),
    )
    cells = {(*_place(cell), cell["server"]): cell for cell in results["cells"]}
    levels = sorted({cell["concurrency"] for cell in results["cells"]})
    servers = list(dict.fromkeys(cell["server"] for cell in results["cells"]))
    heads = [f"{level} at once: p50 µs (ratio) | p99 | per s | CPU µs" for level in levels]
    for model, client in dict.fromkeys((cell["model"], cell["client"]) for cell in results["cells"]):
        lines += ["", f"**{model}, {client}**", ""]
        rows = []
        for server in servers:
            row = [server]
            for level in levels:
                cell = cells.get((model, client, level, server))
                row += _figures(cell) if cell else [""] * 4
            rows.append(row)
        lines += _table(["server", *(name for head in heads for name in head.split(" | "))], rows)
    return "\n".join(lines) + "\n"


def _figures(cell: Record) -> list[str]:
    ratio = f" ({cell['ratio']:.2f})" if cell["ratio"] else ""
    ratio += "" if cell["foreign_cores"] <= _QUIET else "*"
    return [
        f"{cell['p50_us']:.0f}{ratio}",
        f"{cell['p99_us']:.0f}",
        f"{cell['per_second']:.0f}",
        f"{cell['cpu_us']:.0f}",
    ]


def _table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    aligned = ["---", *["---:"] * (len(heads) - 1)]
    return ["| " + " | ".join(row) + " |" for row in ([*heads], aligned, *rows)]
