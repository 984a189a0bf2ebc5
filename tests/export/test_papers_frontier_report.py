"""Reports of ``fewheads frontier``, and the published one: summaries of families by their records alone."""

import json
import re

import msgspec
import pytest

from edge.bench.layer_latencies import PREDICTION
from edge.errors import UsageError
from export.cli.frontier import frontier
from export.errors import CheckpointError
from export.papers.experiment import RECORDS, SETTINGS
from export.papers.frontier.records import DENSE, FROZEN, STATIC, measured
from export.papers.frontier.summary import Summary, geometric
from export.papers.frontier.tables import control_of, tables_of, text_of
from tests.support.families import CONTROL, D8, D32, FEW, HALF, THIRD, family, write_families
from tests.support.task_data import invoke


def summary(*families):
    return Summary([measured(*records) for records in families], FEW)


def test_an_average_is_over_seeds_and_then_over_tasks():
    # SST-2 loses 1 and 3 points, RTE wins 4 with its one seed: (-2 + 4) / 2 = 1.
    wrong = [("SST-2", 0, 20, 22), ("SST-2", 1, 20, 26), ("RTE", 0, 94, 86)]
    found = summary(*(family(task, seed, {D32: dense, D8: dense, HALF: half}) for task, seed, dense, half in wrong))
    assert found.difference(D32).interval == (0, 0)
    assert found.difference(HALF, tasks=found.tasks).value == pytest.approx(1.0)
    assert [one.value for one in found.by_task(HALF).values()] == pytest.approx([-2.0, 4.0])
    # RTE's dense model is right on 53 %, which is no better than a constant answer: half of 200.
    assert [task.chance for task in found.tasks.values()] == [50, 50]
    assert found.judged == found.above_chance == ["SST-2"]
    judged = found.difference(HALF)
    assert judged.value == pytest.approx(-2.0)
    assert judged.interval[0] < -14  # Student's with two seeds, which differ by 2: 12.7 * 1
    assert found.speedups(HALF).tolist() == [2, 8, 2]
    rows = tables_of(found)[3].rows  # dense in FP32 and INT8, half
    assert rows[2][2:6] == ("3.17 (2.00 … 8.00)", "3.17", "1.59", "72.5")  # geometric, over dense INT8 of 2
    assert rows[0][5] == "71.5"


def test_a_tier_is_compared_with_its_control_on_the_seeds_that_have_both():
    runs = {D32: 20, D8: 20, THIRD: 22}
    found = summary(
        family("SST-2", 0, runs | {CONTROL: 30}),
        family("SST-2", 1, runs | {CONTROL: 32, THIRD: 20}),
        family("SST-2", 2, runs | {THIRD: 90}),
    )
    assert control_of(found) == (THIRD, CONTROL)
    assert found.difference(THIRD, CONTROL).value == pytest.approx(5)
    assert [geometric(found.speedups(key, other)) for key, other in ((THIRD, CONTROL), (CONTROL, THIRD))] == (
        pytest.approx([4, 3])
    )


def test_a_report_needs_the_records_alone(tmp_path):
    runs = {D32: 20, D8: 20, THIRD: 22, CONTROL: 30, ("3x", STATIC): 24}
    families = [*(family("SST-2", seed, runs) for seed in range(2)), family("RTE", 0, {D32: 100, D8: 104})]
    write_families(tmp_path, families)
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--json"))
    assert [table["title"] for table in found["tables"]][:2] == ["Aims", "Restored on plain text, and not restored"]
    assert found["missing"] == 0
    report = (tmp_path / "report.md").read_text()
    for row in (
        r"\| 3x \| 3\.0× \(32 tokens, batch 1\) \| 4\.0× \| 1\.0 \(",
        r"\| SST-2 \| accuracy \| 90\.0 \| 91\.5 \|",
        r"\| SST-2 2 \| 4\.00 \| 3\.00 \| \+4\.0 \(",
        r"\| 3x, planned for 3\.0×, at 0\.5 on SST-2 \| missed \| 1\.00",
        r"\| static INT8 of 3x at 0\.3 below its FP32 \| missed \| 1\.00",
        r"\| restored ahead of not restored \| met \| -4\.00 \| -\d",
        # No average over all tasks: RTE has no third.
        r"\| 3x \| fp32 \| [^|]+\| [^|]+\| [^|]+\|  \|  \| -1\.0 \(",
    ):
        assert re.search(f"^{row}", report, re.MULTILINE), row
    assert f"for orin ({PREDICTION})" in report
    assert "are without RTE, where the dense model is not significantly better than chance, unless" in report
    assert "intervals over items and seeds." in report
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    for option in ("--epochs", "--jobs"):
        message = f"{option}: got an option of a training, expected nothing beside --report. Leave it out"
        with pytest.raises(UsageError, match=message):
            invoke(frontier, "--report", "--out", tmp_path, option, 1)
    with pytest.raises(UsageError, match=r"none/settings\.json: got .*Give the --out of an earlier run"):
        invoke(frontier, "--report", "--out", tmp_path / "none")
    (answered, timed), *others = families
    whole = answered.answers
    for broken in (b"broken", whole[:-9], whole[:100] + b"\0" * 20 + whole[120:], b""):
        write_families(tmp_path, [(msgspec.structs.replace(answered, answers=broken), timed), *others])
        with pytest.raises(CheckpointError, match=r"records of SST-2-seed0: got .*Delete its lines, and give the same"):
            invoke(frontier, "--report", "--out", tmp_path)
    speedups = {name: value for name, value in timed.speedups.items() if name != "3x/fp32"}
    write_families(tmp_path, [(answered, msgspec.structs.replace(timed, speedups=speedups)), *others])
    with pytest.raises(CheckpointError, match=r"SST-2-seed0: got no times of 3x/fp32, expected times of every file"):
        invoke(frontier, "--report", "--out", tmp_path)


def test_the_published_report_is_that_of_its_records(tmp_path):
    published = FROZEN.parent / "restored"
    for name in (RECORDS, SETTINGS):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    invoke(frontier, "--report", "--no-plots", "--out", tmp_path)
    assert (published / "report.md").read_text().startswith((tmp_path / "report.md").read_text().rstrip())


def test_aims_allow_for_uncertainty():
    files = (D32, ("4x", "fp32"), CONTROL, ("4x", "int8"), D8, THIRD, (DENSE, STATIC))
    found = summary(family("MRPC", 0, dict(zip(files, (90, 90, 91, 90, 90, 90, 91), strict=True))))
    rows = {row[0]: row[1:] for row in tables_of(found)[0].rows}
    assert rows["4x, planned for 4.0×, at 1.0 on MRPC"] == ("met", "0.00", "0.00")
    assert rows["static INT8 of dense at 0.3 below its FP32"][:2] == ("met", "0.27")
    # One item, which a resample may lack.
    assert rows["restored ahead of not restored"][:2] == ("not certain", "-0.27")
    text = text_of(found)
    assert "MRPC (n = 200, 1 seed, 12 tokens)" in text
    assert "intervals over items." in text
    # A constant answer has a better F1 than a model that errs on 90 of 200.
    assert "On none of these tasks is the dense model better than chance" in text


def test_a_report_leaves_out_families_that_are_not_timed(tmp_path):
    write_families(tmp_path, [family(task, 0, {D32: 20, D8: 20}) for task in ("SST-2", "RTE")])
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join(lines[:3]))
    found = json.loads(invoke(frontier, "--report", "--no-plots", "--json", "--out", tmp_path))
    assert found["missing"] == 1
    assert "SST-2 (n" in found["text"]
    assert "RTE" not in found["text"]
