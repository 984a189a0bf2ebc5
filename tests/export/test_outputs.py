"""No command replaces what it reads, and earlier results only with --replace; each says so before it loads torch."""

import shutil
import subprocess
import sys

import pytest

from edge.errors import UsageError
from export.cli import export, train
from export.errors import TrainingError
from export.experiments.attention.cli import compare
from export.experiments.frontier_cli import frontier
from export.reduction.cli import reduce
from export.routing.cli import route
from export.tasks.cli import finetune
from tests.support.task_data import invoke


@pytest.fixture
def place(sst2, tmp_path):
    """A directory with data, a model, three runs, a link to one of them, bundles, and files of other kinds."""
    root = tmp_path / "place"
    shutil.copytree(sst2 / "glue", root / "data" / "glue")
    shutil.copytree(sst2 / "model", root / "model")
    for name in ("full", "lean", "earlier"):
        shutil.copytree(sst2 / "SST-2", root / name)
    (root / "link").symlink_to(root / "full")
    (root / "figures.json").write_text("{}")
    (root / "figures.png").write_text("not a picture")
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").touch()
    (root / "file").touch()
    (root / "own.onnx").touch()
    (root / "bundles" / "sst2-1").mkdir(parents=True)
    (root / "bundles" / "sst2-1" / "manifest.json").touch()
    (root / "bundles" / "photos-1").mkdir()
    (root / "bundles" / "photos-1" / "cat.jpg").touch()
    return root


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


MODEL = ("--data-dir", "data", "--model")
INPUTS = "expected a path apart from everything else that the command reads or writes"
EARLIER = r"expected a free path\. Give --replace to replace it, or (another|--version 2)"
REFUSED = [
    # What is read.
    (
        finetune,
        ("sst-2", *MODEL, "model", "--teacher", "full", "--name", "full", "--out", "."),
        "the path of --teacher",
    ),
    (finetune, ("sst-2", *MODEL, "full", "--name", "full", "--out", "."), "the path of --model"),
    (finetune, ("sst-2", *MODEL, "full", "--name", "link", "--out", "."), "the path of --model"),
    (finetune, ("sst-2", *MODEL, "full", "--out", "link"), "a path inside of --model"),
    (finetune, ("sst-2", *MODEL, "full", "--name", "place", "--out", ".."), "a directory that holds --model"),
    (finetune, ("sst-2", *MODEL, "full", "--name", "SST-2", "--out", "data/glue"), "the path of the data in"),
    (finetune, ("sst-2", *MODEL, "full", "--name", "glue", "--out", "data"), "a directory that holds the data in"),
    (reduce, ("full", "--out", "full"), "the path of RUN"),
    (reduce, ("link", "--out", "full"), "the path of RUN"),
    (reduce, ("full", "--data-dir", "data", "--out", "data/glue/SST-2/x"), "a path inside of the data in"),
    (reduce, ("full", "--out", "new", "--plot", "full/plot.png"), "a path inside of RUN"),
    (reduce, ("full", "--out", "new", "--plot", "link/plot.png"), "a path inside of RUN"),
    (route, ("full", "lean", "--cost-ratio", 0.5, "--out", "full/config.json"), "a path inside of FULL_RUN"),
    (route, ("full", "lean", "--cost-ratio", 0.5, "--out", "lean/new.json"), "a path inside of LEAN_RUN"),
    (route, ("full", "lean", "--cost-ratio", 0.5, "--out", "a.png", "--plot", "a.png"), "the path of --out"),
    (compare, ("full", "--out", "full/compared"), "a path inside of RUN"),
    (compare, ("full", "--data-dir", "data", "--out", "data"), "a directory that holds the data in"),
    (frontier, (*MODEL, "model", "--task", "SST-2", "--out", "model"), "the path of --model"),
    (frontier, (*MODEL, "model", "--task", "SST-2", "--out", "data/glue/SST-2"), "the path of the data of SST-2 in"),
    (export, ("full", "--repository", "full", "--name", "sst2"), "a path inside of run full"),
    (
        export,
        ("full", "--data-dir", "data", "--repository", "data/glue/SST-2", "--name", "sst2"),
        "a path inside of the data in",
    ),
]
EXISTING = [
    (train, ("calculator-oracle", "--out", "."), "calculator-oracle", "an existing run"),
    (finetune, ("sst-2", *MODEL, "model", "--name", "earlier", "--out", "."), "earlier", "an existing run"),
    (reduce, ("full", "--out", "earlier"), "earlier", "an existing run"),
    (reduce, ("full", "--out", "new", "--plot", "figures.png"), "figures.png", "an existing file"),
    (route, ("full", "lean", "--cost-ratio", 0.5, "--out", "figures.json"), "figures.json", "an existing file"),
    (route, ("full", "lean", "--cost-ratio", 0.5, "--plot", "figures.png"), "figures.png", "an existing file"),
    (export, ("full", "--repository", "bundles", "--name", "sst2"), "sst2-1", "an existing bundle"),
    (export, ("own.onnx", "--repository", "bundles", "--name", "sst2"), "sst2-1", "an existing bundle"),
]
NOT_OURS = [
    (export, ("own.onnx", "--repository", "b", "--name", "x", "--tier-name", "y"), "--tier-name: got 'y'"),
    (train, ("calculator-oracle", "--out", "photos/cat.jpg/below"), "which is no directory"),
    (finetune, ("sst-2", *MODEL, "model", "--name", "photos", "--out", "."), "something that is not a run"),
    (finetune, ("sst-2", *MODEL, "model", "--out", "file/below"), "which is no directory"),
    (reduce, ("full", "--out", "photos"), "something that is not a run"),
    (reduce, ("full", "--out", "new", "--plot", "none/plot.png"), "no such directory"),
    (reduce, ("full", "--out", "new", "--plot", "plot.gif"), "expected a file that ends in .png or .svg or .pdf"),
    (export, ("full", "--repository", "bundles", "--name", "photos"), "something that is not a bundle"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "arguments", "relation"), REFUSED)
def test_inputs_are_not_overwritten_even_with_replace(place, monkeypatch, command, arguments, relation):
    before = contents(place)
    monkeypatch.chdir(place)
    replace = () if command in (compare, frontier) else ("--replace",)
    with pytest.raises(UsageError, match=f"got {relation} .*{INPUTS}"):
        invoke(command, *arguments, *replace)
    assert contents(place) == before


@pytest.mark.parametrize(("command", "arguments", "path", "what"), EXISTING)
def test_existing_results_need_replace(place, monkeypatch, command, arguments, path, what):
    if command is train:
        invoke(train, "calculator-oracle", "--out", place)
    before = contents(place)
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=f"{path}: got {what}, {EARLIER}"):
        invoke(command, *arguments)
    assert contents(place) == before


@pytest.mark.parametrize(("command", "arguments", "message"), NOT_OURS)
def test_other_files_are_not_replaced_even_with_replace(place, monkeypatch, command, arguments, message):
    before = contents(place)
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=message):
        invoke(command, *arguments, "--replace")
    assert contents(place) == before


@pytest.mark.parametrize("command", [compare, frontier])
def test_an_experiment_rejects_a_directory_with_other_files(place, monkeypatch, command):
    arguments = ("full",) if command is compare else (*MODEL, "model")
    before = contents(place)
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match="--out photos: got a directory with other files"):
        invoke(command, *arguments, "--out", "photos")
    assert contents(place) == before


def test_the_installed_command_ends_with_2_and_loads_no_torch(place):
    arguments = ("finetune", "sst-2", *MODEL, "full", "--teacher", "full", "--name", "full", "--out", ".")
    code = "import sys; from edge.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert "--out full: got the path of --model full" in done.stderr


def test_a_run_is_replaced_when_the_new_one_is_complete(place):
    options = ("--model", place / "model", "--data-dir", place / "data", "--max-length", 32, "--limit", 32)
    options += ("--epochs", 1, "--out", place, "--name", "earlier", "--replace")
    before = contents(place / "earlier")
    with pytest.raises(TrainingError, match="expected a finite number"):
        invoke(finetune, "sst-2", *options, "--lr", 1e30, "--batch", 8)
    assert contents(place / "earlier") == before
    (place / ".earlier.state").unlink(missing_ok=True)
    invoke(finetune, "sst-2", *options, "--lr", 1e-3, "--seed", 1)
    assert contents(place / "earlier") != before


def test_names_that_are_paths_are_rejected(place):
    for name in ("a/b", "..", ".hidden", ""):
        with pytest.raises(UsageError, match=r"--name: got .*expected the name of a directory"):
            invoke(finetune, "sst-2", "--model", place / "model", "--name", name)
