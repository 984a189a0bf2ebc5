r"""Generates questions of DeepMind's mathematics dataset as files, in the layout of the published ones.

The generator needs an old sympy that torch does not accept, so this script runs in an environment of its own, and
imports nothing of this project::

    python3 -m venv mathenv
    mathenv/bin/pip install sympy==1.5.1 mathematics-dataset==1.0.1
    mathenv/bin/python export/papers/backward/generate_mathematics.py --out mathematics \
        --modules arithmetic__mul,numbers__gcd

It writes ``OUT/SPLIT/MODULE.txt`` with a question and its answer on alternating lines. The splits are ``train-easy``,
``train-medium`` and ``train-hard``, a third of ``--per-module`` each, or ``train`` with ``--merge-train``; then
``interpolate``, and ``extrapolate`` for the modules that have harder questions, under their own names, such as
``arithmetic__mul_big``. No question is in a module's files twice, and none of a test split is in a training split.

The same arguments write the same files. Files that are there already are kept, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

#: Lengths of the published files; longer questions and answers are dropped.
MAX_QUESTION_CHARS, MAX_ANSWER_CHARS = 160, 30
#: Ends of the names of harder questions.
EXTRAPOLATIONS = ("_big", "_longer", "_more", "_more_samples")
#: A module has no further questions if so many draws in a row are known.
_VAIN_DRAWS = 10_000
_PROGRESS_SECONDS = 5.0
#: Of difficulty, a training split each.
_LEVELS = ("easy", "medium", "hard")

Sample = Callable[[], tuple[str, str]]


class File(NamedTuple):
    """A file to generate: its split, its module, its number of questions, and what draws one of them."""

    split: str
    module: str
    questions: int
    sample: Sample


def distinct(sample: Sample, number: int, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield questions and answers that are not ``known``, which they become.

    Fewer than ``number`` are drawn if the module has no more.
    """
    vain = 0
    while number and vain < _VAIN_DRAWS:
        question, answer = sample()
        if question in known or len(question) > MAX_QUESTION_CHARS or len(answer) > MAX_ANSWER_CHARS:
            vain += 1
            continue
        known.add(question)
        yield question, answer
        number, vain = number - 1, 0


def main() -> None:
    """Read the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", required=True, help="names joined by commas, such as arithmetic__mul,numbers__gcd")
    parser.add_argument("--per-module", type=_positive, default=40_000, help="to train on (default: %(default)s)")
    parser.add_argument("--per-test", type=_positive, default=1_000, help="of each test split (default: %(default)s)")
    parser.add_argument("--merge-train", action="store_true", help="write one training split instead of three")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the files")
    given = parser.parse_args()
    levels = 1 if given.merge_train else len(_LEVELS)
    if given.per_module < levels:
        parser.error(f"--per-module: got {given.per_module}, expected {levels} or more, one of each level. Give 3000.")
    if os.environ.get("PYTHONHASHSEED") != "0":
        # sympy sorts terms by their hashes, which differ from process to process otherwise.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    _keep_settings(parser, given)
    files = _files(parser, given)
    known: dict[str, set[str]] = {}
    for number, file in enumerate(files, 1):
        base = next(name for name in given.modules.split(",") if _is_of(file.module, name))
        label = f"{number} of {len(files)}: {file.split}/{file.module}"
        _write(given.out / file.split / f"{file.module}.txt", file, known.setdefault(base, set()), label, given.seed)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected a positive number. Give 1000, for example.")
    return number


def _is_of(module: str, name: str) -> bool:
    return module in (name, *(name + end for end in EXTRAPOLATIONS))


def _files(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[File]:
    """Return what to generate, test splits first."""
    try:
        from mathematics_dataset.modules import modules  # type: ignore[import-not-found]
    except ImportError as error:
        parser.error(f"mathematics_dataset: got {error}, expected the package. Install it as --help says.")
    trains = ["train"] if given.merge_train else [f"train-{level}" for level in _LEVELS]
    samplers = {"interpolate": modules.test(), "extrapolate": modules.test_extra()}
    for level, split in enumerate(trains):
        samplers[split] = modules.train(_part(level, len(trains)))
    flat = {
        split: {f"{area}__{name}": sampler for area, names in areas.items() for name, sampler in names.items()}
        for split, areas in samplers.items()
    }
    files = []
    for name in given.modules.split(","):
        if name not in flat[trains[0]]:
            close = difflib.get_close_matches(name, flat[trains[0]], n=1)
            fix = f"Did you mean {close[0]}?" if close else "Leave it out."
            parser.error(f"--modules: got {name!r}, expected names of {', '.join(flat[trains[0]])}. {fix}")
        for split, of_split in flat.items():
            questions = given.per_test if split not in trains else given.per_module // len(trains)
            files += [
                File(split, module, questions, partial(_drawn, sampler))
                for module, sampler in of_split.items()
                if (_is_of(module, name) if split == "extrapolate" else module == name)
            ]
    return files


def _drawn(sampler: Callable[[], Any]) -> tuple[str, str]:
    problem = sampler()
    return str(problem.question), str(problem.answer)


def _part(level: int, levels: int) -> Callable[[tuple[float, float]], tuple[float, float]]:
    """Return what cuts a range of difficulties to one of equal parts."""

    def cut(bounds: tuple[float, float]) -> tuple[float, float]:
        width = (bounds[1] - bounds[0]) / levels
        return bounds[0] + level * width, bounds[0] + (level + 1) * width

    return cut


def _keep_settings(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Write the settings beside the files, or compare them with those of an earlier run."""
    settings = {name: getattr(given, name) for name in ("per_module", "per_test", "merge_train", "seed")}
    path = given.out / "settings.json"
    if not path.exists():
        given.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")
    elif (earlier := json.loads(path.read_text())) != settings:
        parser.error(f"--out {given.out}: got files made with {earlier}, expected {settings}. Give another --out.")


def _write(path: Path, file: File, known: set[str], label: str, seed: int) -> None:
    """Write a file whole, or read what an earlier run wrote; its questions become known."""
    if path.exists():
        known.update(path.read_text().splitlines()[::2])
        print(f"{label}: already there", file=sys.stderr)
        return
    import numpy  # comes with mathematics_dataset

    # Each file has its own numbers, whatever is generated before it. The modules draw from both generators.
    random.seed(f"{seed} {file.split} {file.module}")
    numpy.random.seed(random.getrandbits(32))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch, written, shown = path.with_suffix(".new"), 0, time.monotonic()
    with open(scratch, "w") as lines:
        for question, answer in distinct(file.sample, file.questions, known):
            lines.write(f"{question}\n{answer}\n")
            written += 1
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"{label}: {written} of {file.questions}", file=sys.stderr)
    scratch.replace(path)
    remark = "" if written == file.questions else f", all that there are; {file.questions} were asked for"
    print(f"{label}: {written} questions{remark}", file=sys.stderr)


if __name__ == "__main__":
    main()
