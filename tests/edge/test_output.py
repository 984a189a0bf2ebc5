"""Lines of progress, and tables."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

from edge.cli import output


def test_lines_have_the_current_task_its_position_and_its_note(monkeypatch, capsys):
    def lines(needed):
        """Wait until so many lines were printed, and return them."""
        found, deadline = [], time.monotonic() + 10
        while len(found) < needed:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
            found += capsys.readouterr().err.splitlines()
        return found

    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    with output.progress() as bar:
        first, second, _ = (bar.add_task(name, total=4, note="") for name in ("first", "second", "third"))
        bar.update(first, completed=4)
        bar.update(second, completed=3, note="nearly")
        assert re.fullmatch(r"second: 3 of 4, nearly, 0:00:\d\d(, about 0:00:\d\d left)?", lines(3)[-1])
    capsys.readouterr()
    with output.progress() as bar:
        bar.add_task("one", total=None, note="")
        assert all(re.fullmatch(r"one: 0:00:\d\d", line) for line in lines(3))
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_table_of_fields(capsys):
    latency = SimpleNamespace(p99_9_ms=1234.4)
    rows = [SimpleNamespace(latency=latency, tiers={"lean": 2, "full": 1}, name="[red]", more=None)]
    output.print_fields("title", ("latency.p99_9_ms", "tiers", "name", "more"), rows)
    title, _, heads, _, cells, _ = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert re.split(r"\s*[│┃]\s*", heads)[1:-1] == ["p99.9 ms", "tiers", "name", "more"]
    assert re.split(r"\s*[│┃]\s*", cells)[1:-1] == ["1234", "full 1, lean 2", "[red]", ""]
