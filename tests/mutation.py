"""Mutation score of modules: random small changes of the code, and whether the modules' own tests notice them.

    .venv-mutation/bin/python tests/mutation.py edge/scheduling --share 0.2 --seed 0 [--json FILE]

cosmic-ray (https://cosmic-ray.readthedocs.io) makes the mutants: comparisons, arithmetic, booleans and constants, at
most one at each place. They are run in a copy of the tree. `tests/mutation.toml` names the tests of each module.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib
from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
#: Names of operators begin so. Bitwise ones would change type annotations, and `is` hardly differs from `==`.
_NAMES = {
    "ReplaceBinaryOperator_": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul",
    "ReplaceComparisonOperator_": "Eq_NotEq NotEq_Eq Lt_LtE Lt_Gt LtE_Lt LtE_Gt Gt_GtE Gt_Lt GtE_Gt GtE_Lt",
    "ReplaceComparisonOperator_Is": "_IsNot Not_Is",
    "ReplaceUnaryOperator_": "Delete_Not Delete_USub",
    "": "ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd AddNot NumberReplacer",
}
OPERATORS = {f"core/{kind}{name}" for kind, names in _NAMES.items() for name in names.split()}
SECONDS = 120.0


def tests_of(paths):
    table = tomllib.loads(TABLE.read_text())["modules"]
    found = {module: tests for module, tests in table.items() if module.startswith(tuple(paths))}
    if not found:
        sys.exit(f"{' '.join(paths)}: got no module of {TABLE}, expected some. Add them there.")
    return found


def sample(session, share, chance):
    """Keep a random share of the places of a session, with one mutant each, and return their number."""
    places = {}
    lines = {}
    with use_db(session, WorkDB.Mode.open) as database:
        items = list(database.pending_work_items)
        for item in items:
            mutation = item.mutations[0]
            row, column = mutation.start_pos
            source = lines.setdefault(mutation.module_path, mutation.module_path.read_text().splitlines())
            in_signature = source[row - 1][column:].startswith("*,")  # cosmic-ray takes it for a multiplication
            if mutation.operator_name in OPERATORS and not in_signature:
                places.setdefault(item.mutations[0].start_pos, []).append(item)
        wanted = share * len(places)
        count = int(wanted) + (chance.random() < wanted % 1)
        kept = {chance.choice(places[place]).job_id for place in chance.sample(sorted(places), count)}
        skipped = [item.job_id for item in items if item.job_id not in kept]
        database.set_multiple_results(skipped, WorkResult(WorkerOutcome.SKIPPED))
    return count


def run(module, tests, share, python, chance):
    """Run mutants of a module in this directory; return whether each was noticed, and its diff."""
    session = Path(f"{module.replace('/', '.')}.sqlite")
    command = f"{python} -m pytest -x -q -p no:cacheprovider {' '.join(tests)}"
    config = ConfigDict({"module-path": module, "timeout": SECONDS, "excluded-modules": [], "test-command": command})
    config["distributor"] = {"name": "local"}
    with use_db(session, WorkDB.Mode.create) as database:
        init([Path(module)], database, {})
    if sample(session, share, chance):
        with use_db(session, WorkDB.Mode.open) as database:
            execute(database, config)
    with use_db(session, WorkDB.Mode.open) as database:
        results = [result for _, result in database.results if result.worker_outcome is not WorkerOutcome.SKIPPED]
    return [(result.is_killed, result.diff or "") for result in results]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", nargs="+", help="modules, or directories of them")
    parser.add_argument("--share", type=float, default=0.2, help="share of the places that are changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--json", type=Path, help="write the counts of each module there")
    options = parser.parse_args()
    table = tests_of(options.paths)
    chance = random.Random(options.seed)
    counts = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as copy:
        files = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(copy) / name, follow_symlinks=False)  # some bundles are broken by a link
        os.chdir(copy)
        os.environ["PYTHONPATH"] = copy
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same size and second would not be compiled again
        for module, tests in table.items():
            base = [options.python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            if subprocess.run(base, capture_output=True).returncode:
                sys.exit(f"{module}: its tests fail without a mutation: {' '.join(base)}")
            found = run(module, tests, options.share, options.python, chance)
            counts[module] = [sum(noticed for noticed, _ in found), len(found)]
            print(f"{module}: {counts[module][0]} of {counts[module][1]}", flush=True)
            for noticed, diff in found:
                if not noticed:
                    print(diff, flush=True)
    noticed, whole = (sum(count[index] for count in counts.values()) for index in (0, 1))
    print(f"{noticed} of {whole} mutants noticed, {noticed / max(whole, 1):.0%}")
    if options.json:
        options.json.write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
