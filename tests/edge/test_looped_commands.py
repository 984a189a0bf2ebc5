"""Commands on looped models: requests with limits, measurements with loops, files by role."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge.bundles import rules
from edge.bundles.bundle import Bundle
from edge.errors import BundleError, InvalidRequest
from edge.launch import running_server
from edge.programs.tier_program import load_tier
from edge.repository.model import Model
from tests.support.commands import fewheads, mistake, shown
from tests.support.jobs import prepared
from tests.support.loop_model import ENDLESS, NAME, prompt, write_halving_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_halving_bundle(tmp_path_factory.mktemp("loop") / NAME)


@pytest.fixture(scope="module")
def looped_url(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server([bundle.path], cache=tmp_path_factory.mktemp("cache")) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def found(*arguments: object) -> Any:
    return json.loads(shown(*arguments, "--json"))


def test_infer_sends_a_file_with_limits_or_says_what_is_wrong_with_it(looped_url: str, tmp_path: Path) -> None:
    file, archive, wrong = tmp_path / "prompts.json", tmp_path / "prompts.npz", tmp_path / "prompt.json"
    file.write_text(json.dumps({"xs": prompt(1, 2, ENDLESS).tolist()}))
    wrong.write_text('{"xy": [[[1]]]}')
    np.savez(archive, xs=prompt(1))
    infer = ("infer", NAME, "--url", looped_url)
    for options, loops, stopped in (
        ((f"--input=@{file}", "--max-loops=3"), [3, 3, 3], "budget"),
        ((f"--input=@{archive}", "--tolerance=0.5"), [1], "tolerance"),
    ):
        answer = found(*infer, *options)
        assert ([row[0] for row in answer["outputs"]["loops"]], answer["stopped"]) == (loops, stopped)
    assert "stopped by its budget" in shown(*infer, f"--input=@{file}")
    for tensor, message in (
        ("xs=[[1],[2]]", "got the shape [2, 1], expected [-1, -1, 1]. The first dimension is that of the rows"),
        ("xs=[[[1, 2]]]", "got the shape [1, 1, 2], expected [-1, -1, 1]. The model's metadata"),
        (f"@{wrong}", "got 'xy', expected tensors of ['xs']"),
        (f"@{tmp_path / 'none.json'}", "No such file"),
    ):
        assert message in mistake(*infer, "--input", tensor)


def test_bench_measures_the_loops_of_its_limits(bundle: Bundle, looped_url: str) -> None:
    bench = ("bench", bundle.path, "--url", looped_url, "--requests", 20)
    for options, loops in (((), 4), (("--max-loops", 3), 3), (("--tolerance", 0.5, "--rows", 2), 1)):
        (report,) = found(*bench, *options)
        assert (report["in_process"]["loops"], report["served"]["loops"]) == (loops, loops)


def test_load_has_the_loops_of_its_limits(bundle: Bundle, looped_url: str) -> None:
    report = found(
        *("bench", bundle.path, "--url", looped_url, "--rate", 100, "--arrivals", "constant", "--seconds", 0.3),
        *("--warm-up", 0, "--tolerance", 0.25, "--max-loops", 9),
    )
    assert [(name, group["requests"], group["loops"]) for name, group in report["groups"].items()] == [("all", 30, 2)]


def test_profile_times_files_and_loops(bundle: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    times = found("profile", bundle.path, "--calls", 3, "--target", "onnxruntime", "--cache", tmp_path, "--out", out)
    assert json.loads(out.read_bytes()) == times
    assert [(file["role"], file["rows"]) for file in times["files"]] == [
        (role, rows) for rows in (1, 4) for role in ("embed", "step")
    ]
    assert all(file["milliseconds"] > 0 for file in times["files"])
    assert [(loop["rows"], loop["golden_loops"]) for loop in times["loops"]] == [(1, 4), (4, 4)]
    profile = ("profile", bundle.path, "--calls", 3, "--cache", tmp_path)
    assert "this takes minutes" in fewheads(*profile, "--json").stderr
    assert "got a file, expected a free path" in mistake(*profile, "--out", out)
    assert "--lengths: got (8,), expected none with a bundle" in mistake(*profile, "--lengths", 8)
    assert "--out: expected a file for the table" in mistake("profile", tmp_path)


def test_profile_times_one_loop_of_those_that_are_computed_at_once(tmp_path: Path) -> None:
    grouped = write_halving_bundle(tmp_path / NAME, check_every=16)
    times = found("profile", grouped.path, "--calls", 21, "--target", "onnxruntime", "--cache", tmp_path)
    steps = [file["milliseconds"] for file in times["files"] if file["role"] == "step"]
    for loop, step in zip(times["loops"], steps, strict=True):
        assert step / 10 < loop["milliseconds"] < 4 * step  # a group of 16 is none, or 16 times as long


def test_on_device_measures_loops(bundle: Bundle, tmp_path: Path) -> None:
    quick = ("--requests=10", "--rounds=2", "--idle-gaps=0.01", "--idle-requests=1", "--target=onnxruntime")
    record = found("bench", "--on-device", bundle.path, *quick, "--cache", tmp_path)
    assert {(one["rows"], one["where"], one["loops"]) for one in record["series"]} == {
        (rows, where, 4) for rows in (1, 4) for where in ("in process", "served")
    }


def test_info_build_and_doctor_name_the_roles(bundle: Bundle, tmp_path: Path) -> None:
    text = shown("info", bundle.path)
    assert "step until residual is at most 0.1 (tolerance) or 20 loops are done (max_loops)" in text
    text = shown("build", bundle.path, "--target", "onnxruntime", "--cache", tmp_path)
    assert all(f"{NAME} 1 (full {role})" in text for role in ("embed", "step"))
    checks = {check["name"]: check for check in found("doctor", bundle.path)["checks"]}
    assert all(checks[f"{NAME} full {role}"]["status"] == "ok" for role in ("embed", "step"))
    broken = shutil.copytree(bundle.path, tmp_path / "broken")
    (broken / "step.onnx").write_bytes(b"broken")
    done = fewheads("doctor", broken, "--json")
    assert done.returncode == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"].startswith("broken")]
    assert (check["status"], "step.onnx" in check["found"]) == ("failed", True)


def test_a_prompt_has_one_point_more_than_values(bundle: Bundle, tmp_path: Path) -> None:
    manifest = bundle.manifest
    for points, values in (("xs", None), ("xs", "zz"), ("xs", "xs")):
        program = msgspec.structs.replace(manifest.program, points=points, values=values)
        with pytest.raises(BundleError, match=r"loop points and values: got .*, expected two of \['xs'\], or neither"):
            rules.check(msgspec.structs.replace(manifest, program=program), "m")
    paired = write_halving_bundle(tmp_path / "paired", values=True)
    program = load_tier(paired, "onnxruntime", tmp_path)
    model = Model(paired, {("full", role): loaded for role, loaded in program.files.items()})
    good = {"xs": prompt(1, tokens=3), "ys": np.ones((1, 2), np.float32)}
    assert prepared(model, good)[0] == 1
    with pytest.raises(InvalidRequest, match=r"'xs' and 'ys' of 'halving': got 4 points and 2 values, expected one"):
        prepared(model, {**good, "xs": prompt(1, tokens=4)})
    program.close()
