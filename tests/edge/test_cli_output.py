"""Tables, and progress where stderr is not a terminal: a line at every interval, however long a step takes."""

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from edge.cli import output
from edge.cli.build import note_of
from edge.runtimes.runtime import BuildProgress


@pytest.fixture
def lines(monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)

    def printed(needed):
        """Wait until so many lines were printed, and return them."""
        found, deadline = [], time.monotonic() + 10
        while len(found) < needed:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
            found += capsys.readouterr().err.splitlines()
        return found

    return printed


def test_step_without_an_end_prints_lines(lines):
    with output.progress() as bar:
        bar.add_task("one", total=None, note="")
        assert all(re.fullmatch(r"one: 0:00:\d\d", line) for line in lines(3))


def test_lines_have_the_current_task_its_position_and_its_note(lines):
    with output.progress() as bar:
        first, second, _ = (bar.add_task(name, total=4, note="") for name in ("first", "second", "third"))
        bar.update(first, completed=4)
        bar.update(second, completed=3, note="nearly")
        assert re.fullmatch(r"second: 3 of 4, nearly, 0:00:\d\d", lines(3)[-1])


def test_no_lines_after_the_end(lines, capsys):
    with output.working("work"):
        lines(1)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_long_note_wraps_and_leaves_the_position(monkeypatch):
    screen = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(output, "stderr", screen)
    bar = output.progress()
    note = note_of(BuildProgress("a long name of a step of a compiler", 0.42, 180.0))
    bar.add_task("sentiment", total=100, completed=42, note=note)
    screen.print(bar.get_renderable())
    text = screen.file.getvalue()
    assert "42/100" in text
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).endswith("3 min left: a long name of a step of a compiler")
    assert note_of(BuildProgress("step", 0.0)) == "step"


def test_table_of_fields(capsys):
    latency = SimpleNamespace(p99_9_ms=1234.4)
    rows = [SimpleNamespace(latency=latency, tiers={"lean": 2, "full": 1}, name="[red]", more=None)]
    output.print_fields("title", ("latency.p99_9_ms", "tiers", "name", "more"), rows)
    title, _, heads, _, cells, _ = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert re.split(r"\s*[│┃]\s*", heads)[1:-1] == ["p99.9 ms", "tiers", "name", "more"]
    assert re.split(r"\s*[│┃]\s*", cells)[1:-1] == [
        "1234",
        "full 1, lean 2",
        "[red]",
        "",
    ]
