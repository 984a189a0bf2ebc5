"""No command replaces what it reads, and earlier results only with --replace; each says so before it loads torch."""

import shutil
import subprocess
import sys

import pytest

from edge.errors import UsageError
from export.cli.compare import compare
from export.cli.export import export
from export.cli.finetune import finetune
from export.cli.frontier import frontier
from export.cli.language import language
from export.cli.pack import pack
from export.cli.reduce import reduce
from export.cli.report import report
from export.cli.shapes import shapes
from export.cli.train import train
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
    files = ("photos/cat.jpg", "bundles/sst2-1/manifest.json", "bundles/photos-1/cat.jpg", "timed/shapes.json")
    for name in (*files, "figures.json", "file", "own.onnx"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


MODEL, HERE = ("--data-dir", "data", "--model"), ("--out", ".")
FRONTIER = (*MODEL, "model", "--tier", "full", "--transfer", "file")
APART = ".*expected a path apart from everything else that the command reads or writes"
#: What --replace allows: another result of the same kind.
EXISTING = [
    (train, ("calculator-oracle", "--out", "."), "calculator-oracle: got an existing run"),
    (finetune, ("sst-2", *MODEL, "model", "--name", "earlier", *HERE), "earlier: got an existing run"),
    (reduce, ("full", "--out", "earlier"), "earlier: got an existing run"),
    (report, ("full", "--out", "figures.json"), "figures.json: got an existing file"),
    (shapes, ("model", "--lengths", "8", "--out", "timed"), "timed: got an existing directory of shapes"),
    (export, ("full", "--repository", "bundles", "--name", "sst2"), "sst2-1: got an existing bundle"),
    (pack, ("own.onnx", "--repository", "bundles", "--name", "sst2"), "sst2-1: got an existing bundle"),
]
#: What nothing allows: inputs, and files of other kinds.
REFUSED = [
    (finetune, ("sst-2", *MODEL, "model", "--teacher", "full", "--name", "full", *HERE), "path of --teacher" + APART),
    (finetune, ("sst-2", *MODEL, "full", "--name", "link", *HERE), "the path of --model" + APART),
    (finetune, ("sst-2", *MODEL, "full", "--name", "glue", "--out", "data"), "a directory that holds the data" + APART),
    (finetune, ("sst-2", *MODEL, "model", "--name", "photos", *HERE), "something that is not a run"),
    (finetune, ("sst-2", *MODEL, "model", "--out", "file/below"), "which is not a directory"),
    (reduce, ("link", "--out", "full"), "the path of RUN" + APART),
    (shapes, ("model", "--lengths", "8", "--out", "model"), "the path of MODEL" + APART),
    (shapes, ("model", "--lengths", "8", "--out", "photos"), "something that is not a directory of shapes"),
    (reduce, ("full", "--data-dir", "data", "--out", "data/glue/SST-2/x"), "a path inside of the data in" + APART),
    (
        language,
        ("dequantize", "file", "--out", "full"),
        r"full: got an existing .*, expected a free path\. Give another --out",
    ),
    (report, ("full", "--out", "none/page.html"), "no such directory"),
    (report, ("full", "--out", "full/config.json"), "a path inside of RUN" + APART),
    (compare, ("full", "--out", "full/compared"), "a path inside of RUN" + APART),
    (compare, ("full", "--data-dir", "data", "--out", "data"), "a directory that holds the data in" + APART),
    (compare, ("full", "--out", "photos"), "a directory with other files"),
    (frontier, (*FRONTIER, "--task", "SST-2", "--out", "model"), "the path of --model" + APART),
    (frontier, (*FRONTIER, "--task", "SST-2", "--out", "data/glue/SST-2"), "the path of the data of" + APART),
    (frontier, (*FRONTIER, "--out", "full"), "the path of --tier full" + APART),
    (frontier, (*FRONTIER, "--out", "photos"), "a directory with other files"),
    (export, ("full", "--repository", "full", "--name", "sst2"), "a path inside of run full" + APART),
    (export, ("full", *MODEL[:2], "--repository", "data/glue/SST-2", "--name", "x"), "path inside of the data" + APART),
    (export, ("full", "--repository", "bundles", "--name", "photos"), "something that is not a bundle"),
]


@pytest.mark.parametrize(("command", "arguments", "message"), [*EXISTING, *REFUSED])
def test_only_earlier_results_are_replaced_and_only_on_request(place, monkeypatch, command, arguments, message):
    if (command, arguments, message) in EXISTING:
        message += r", expected a free path\. Give --replace to replace it, or (another|--version 2)"
    elif command not in (compare, frontier, language):  # they have no --replace
        arguments = (*arguments, "--replace")
    if command is train:
        invoke(train, "calculator-oracle", "--out", place)
    before = contents(place)
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=message):
        invoke(command, *arguments)
    assert contents(place) == before


def test_the_installed_command_ends_with_2_and_loads_no_torch(place):
    arguments = ("finetune", "sst-2", *MODEL, "full", "--teacher", "full", "--name", "full", "--out", ".")
    code = "import sys; from edge.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "--out full: got the path of --model full" in done.stderr


def test_names_that_are_paths_are_rejected(place):
    for name in ("a/b", "..", ".hidden", ""):
        with pytest.raises(UsageError, match=r"--name: got .*expected the name of a directory"):
            invoke(finetune, "sst-2", "--model", place / "model", "--name", name)
