"""Tables from measurements: medians over the repetitions, and ratios within each repetition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from recipes import ACCELERATOR, BARE_BATCHING, OURS, TRITON

Record = dict[str, Any]
_START = ("ready_s", "rss_mb", "pss_mb", "processes")
_CELL = ("mean_us", "p50_us", "p99_us", "per_second", "cpu_us", "foreign_cores", "beyond_us", "run_us")
#: The load that other processes may put on the machine during a measurement, in cores. Measurements with more are
#: left out where there are quieter ones.
_QUIET = 0.2
#: The figures of the accelerator whose ratios are shown: title, requests at once, field.
_COMPARED = (
    ("CPU per request, 16 at once", 16, "cpu_us"),
    ("CPU per request, 64 at once", 64, "cpu_us"),
    ("time beyond the runner, 1 at once", 1, "beyond_us"),
    ("throughput, 16 at once", 16, "per_second"),
)
_TABLES = "## The tables\n"


def summarise(records: list[Record], machine: dict[str, str]) -> Record:
    """Return the medians of the records of each place, and the ratios between servers on the accelerator.

    The ``ratio`` of a cell is that of its p50 to this server's.
    """
    starts = _medians([r for r in records if "ready_s" in r], ("server", "version", "models"), _START)
    measured = [r for r in records if "p50_us" in r]
    cells = _medians(measured, ("model", "client", "concurrency", "server"), _CELL)
    ours = {_place(cell): cell["p50_us"] for cell in cells if cell["server"] == OURS}
    for cell in cells:
        base = ours.get(_place(cell))
        cell["ratio"] = cell["p50_us"] / base if base else None
    days = sorted({r["day"] for r in records})
    return {"days": days, "machine": machine, "starts": starts, "cells": cells, "ratios": _ratios(measured)}


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
        | {field: median(record[field] for record in found) for field in fields if field in found[0]}
        for group, found in groups.items()
    ]


def _ratios(cells: list[Record]) -> list[Record]:
    """Compare our servers with their rivals within each repetition, which cancels the machine's drift."""
    found = {
        (cell["server"], cell["client"], cell["concurrency"], cell["repetition"]): cell
        for cell in cells
        if cell["model"] in ACCELERATOR
    }
    servers = dict.fromkeys(server for server, *_ in found if server.startswith("fewheads"))
    clients = dict.fromkeys(client for _, client, *_ in found)
    repetitions = sorted({repetition for *_, repetition in found})
    ratios = []
    for server, rival, client in product(servers, (TRITON, BARE_BATCHING), clients):
        for title, concurrency, field in _COMPARED:
            both = [[found.get((name, client, concurrency, n)) for name in (server, rival)] for n in repetitions]
            # The kernel's tick is too coarse for short cells.
            pairs = [(ours, theirs) for ours, theirs in both if ours and theirs and theirs[field] > 0]
            quiet = [pair for pair in pairs if max(cell["foreign_cores"] for cell in pair) <= _QUIET]
            values = [ours[field] / theirs[field] for ours, theirs in quiet or pairs]
            if values:
                place = {"server": server, "rival": rival, "client": client, "figure": title, "quiet": bool(quiet)}
                spread = {"median": median(values), "min": min(values), "max": max(values)}
                ratios.append({**place, **spread, "repetitions": len(values)})
    return ratios


def publish(results: Record, page: Path) -> None:
    """Replace the tables at the end of a page; the prose above them stays."""
    prose, heading, _ = page.read_text().partition(_TABLES)
    page.write_text(f"{prose}{heading}\n{markdown(results)}")


def markdown(results: Record) -> str:
    """Return the tables."""
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    noisy = f"* measured while other processes took more than {_QUIET:g} cores."
    lines = [f"Measured {', '.join(results['days'])}; {machine}. {noisy}", ""]
    lines += _table(
        ["server", "models", "version", "ready s", "processes", "idle RSS MB", "idle PSS MB", "repetitions"],
        (
            [
                *(start[key] for key in ("server", "models", "version")),
                f"{start['ready_s']:.2f}",
                *(f"{start[key]:.0f}" for key in ("processes", "rss_mb", "pss_mb", "repetitions")),
            ]
            for start in results["starts"]
        ),
    )
    for model, client in dict.fromkeys((cell["model"], cell["client"]) for cell in results["cells"]):
        cells = [cell for cell in results["cells"] if (cell["model"], cell["client"]) == (model, client)]
        lines += ["", f"**{model}, {client}**", "", *_cells(cells)]
    runs = [cell["run_us"] for cell in results["cells"] if "run_us" in cell]
    if runs:
        run = f"A run on the accelerator takes {median(runs):.0f} µs, measured without a server before each repetition."
        lines += ["", f"{run} The time beyond the runner is the mean latency minus that, for every server."]
    if results["ratios"]:
        lines += ["", "**accelerator: ratios between servers**", "", *_ratio_rows(results)]
        lines += ["", "The median, least and largest ratio within one repetition, over the repetitions."]
    return "\n".join(lines) + "\n"


def _cells(cells: list[Record]) -> list[str]:
    """Return the table of one model and one client."""
    found = {(cell["server"], cell["concurrency"]): cell for cell in cells}
    levels = sorted({cell["concurrency"] for cell in cells})
    beyond = any("beyond_us" in cell for cell in cells)
    heads = [f"{level} at once: p50 µs (ratio) | p99 | per s | CPU µs" for level in levels]
    rows = []
    for server in dict.fromkeys(cell["server"] for cell in cells):
        row = [server]
        if beyond:
            alone = found.get((server, levels[0]), {})
            row.append(f"{alone['beyond_us']:.0f}" if "beyond_us" in alone else "")
        for level in levels:
            cell = found.get((server, level))
            row += _figures(cell) if cell else [""] * 4
        rows.append(row)
    titles = ["server", *(["time beyond the runner µs"] if beyond else [])]
    return _table([*titles, *(name for head in heads for name in head.split(" | "))], rows)


def _ratio_rows(results: Record) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = defaultdict(lambda: [""] * len(_COMPARED))
    titles = [title for title, _, _ in _COMPARED]
    for ratio in results["ratios"]:
        noise = "" if ratio["quiet"] else "*"
        text = f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f}){noise}"
        rows[f"{ratio['server']} / {ratio['rival']}", ratio["client"]][titles.index(ratio["figure"])] = text
    return _table(["servers", "client", *titles], ([*place, *texts] for place, texts in rows.items()))


def _figures(cell: Record) -> list[str]:
    ratio = f" ({cell['ratio']:.2f})" if cell["ratio"] else ""
    ratio += "" if cell["foreign_cores"] <= _QUIET else "*"
    return [f"{cell['p50_us']:.0f}{ratio}", *(f"{cell[key]:.0f}" for key in ("p99_us", "per_second", "cpu_us"))]


def _table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    aligned = ["---", *["---:"] * (len(heads) - 1)]
    return ["| " + " | ".join(row) + " |" for row in ([*heads], aligned, *rows)]
