"""The corpora of broken bundles of both format versions: each gives the error in ``expected.json``; none is served."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edge import errors
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.runtimes.build import load_runner
from tests.data import make_broken_bundles
from tests.data.make_broken_bundles import BROKEN_BUNDLES, CORPORA

EXPECTED = json.loads((BROKEN_BUNDLES / "expected.json").read_text())
#: Format version and case; most cases break both versions.
CASES = [
    (version, case)
    for version in CORPORA
    for case, expected in sorted(EXPECTED.items())
    if expected.get("version", version) == version
]


@pytest.mark.parametrize("models", [True, False], ids=["read whole", "models when needed"])
@pytest.mark.parametrize(("version", "case"), CASES)
def test_broken_bundle_gives_its_error(version: int, case: str, models: bool, tmp_path: Path):
    path, expected = CORPORA[version][1] / case, EXPECTED[case]
    with pytest.raises(errors.FewheadsError) as caught:
        _load(path, tmp_path, models)
    assert type(caught.value) is getattr(errors, expected["error"])
    for fragment in expected["fragments"]:
        assert fragment.replace("{version}", str(version)) in str(caught.value)
    # The four parts: what, given, expected, and the way out.
    assert str(path) in caught.value.subject
    assert caught.value.fix.endswith(".")


@pytest.mark.parametrize("version", CORPORA)
def test_generator_gives_the_same_tree(version: int, tmp_path: Path):
    make_broken_bundles.write(tmp_path, version)
    committed = _tree(CORPORA[version][1])
    committed.pop("expected.json", None)
    assert _tree(tmp_path) == committed


def test_every_case_has_an_expectation():
    made = [(version, case) for version in CORPORA for case in make_broken_bundles.cases(version)]
    assert sorted(made) == sorted(CASES)


def _load(path: Path, cache: Path, models: bool) -> None:
    """Open a bundle as a server does before it serves it."""
    bundle = Bundle.open(path, models=models)
    preprocessor(bundle)
    load_runner(bundle, "onnxruntime", cache)


def _tree(directory: Path) -> dict[str, bytes | str]:
    """Return contents of files, and targets of links, by path."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
    }
