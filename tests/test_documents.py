"""The documents agree with the files, commands and figures that they name."""

import re
import shlex
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import pytest

from deploy import demo, device_table, push
from edge import __version__
from edge.__main__ import GROUPS, grouped
from export.estimate import document
from export.estimate.measurements import published
from export.estimate.predictions import read_latencies
from export.estimate.roofline import ERRORS
from export.models.transformer import LayerShape
from export.papers.adaptive import tables as adaptive_tables
from export.papers.backward import tables as backward_tables
from export.papers.calculator import tables as calculator_tables
from export.papers.frontier import families
from export.papers.looped import tables as looped_tables
from export.reduce import restoration_tables
from export.reduce import tables as reduce_tables
from export.reduce.plan import amdahl_bound, macs_per_token
from export.report.table import Table, with_tables
from export.training.intervals import Difference
from export.training.points import PointTimes
from tests.support.imports import EXPORT_ORDER, ORDER

ROOT = Path(__file__).parent.parent
DEPLOY, REDUCTION = ROOT / "deploy", ROOT / "export" / "reduce"
GLUE = ROOT / "export/papers/frontier/RESULTS.md"
README = (ROOT / "README.md").read_text()
SERVER = (ROOT / "edge" / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DEPLOYMENT, PROOFS = (DEPLOY / "README.md").read_text(), (DEPLOY / "JETSON.md").read_text()
DOCKERFILE = (ROOT / "jetson.Dockerfile").read_text()
COMMANDS = {point.name: point for point in entry_points(group="fewheads.commands")}
ALL = README + SERVER + CONTRIBUTING + DEPLOYMENT + PROOFS + (ROOT / "edge/bundles/FORMAT.md").read_text()


def listed(*patterns):
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).split()


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_every_file_that_the_readme_names_exists():
    section = ""
    for line in README.split("## Tree")[1].splitlines():
        if folder := re.match(r"^(\w+/)", line):
            section = folder[1]
        for name in re.findall(r"\b([a-z_0-9]+\.(?:py|proto))\b", line):
            found = (ROOT / section / name).exists() or (ROOT / name).exists()
            assert found or list(ROOT.glob(f"{section}**/{name}")), name
    for name in re.findall(r"`((?:edge|export|proto|tests|deploy)/[\w./]*)`", ALL):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\b(?:tests|edge|deploy)/[\w/]+\.py\b", ALL):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^\| (`.*?`) ", DEPLOYMENT, re.MULTILINE)[0].replace("`", "").split(", "):
        assert (DEPLOY / name).exists(), name


def test_links_of_all_pages_lead_to_files():
    for page in map(ROOT.joinpath, listed("*.md")):
        for target in re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_the_demo_gives_options_that_its_commands_have():
    COMMANDS["train"].load().make_context("train", [*demo.CALCULATORS, *demo.LOOPED, "--out", "runs", "--replace"])
    texts = ("--distil", demo.__file__, "--out", "runs", "--replace")
    COMMANDS["reduce"].load().make_context("reduce", [str(Path.cwd()), *demo.RESTORED, *texts])


def test_every_command_of_the_readme_exists_and_the_other_way_round():
    """In the groups of the help, and in their order."""
    section = README.split("## Commands")[1].split("##")[0]
    tables = re.findall(r"^\| ([A-Z][\w ]+) \| \|\n((?:\|.*\n)+)", section, re.MULTILINE)
    found = {heading: re.findall(r"^\| `fewheads (\w+)", table, re.MULTILINE) for heading, table in tables}
    assert {heading: list(dict.fromkeys(names)) for heading, names in found.items()} == grouped(COMMANDS)
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(COMMANDS), "edge/__main__.py has the groups of the commands in pyproject.toml"


def test_the_make_targets_of_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", README + SERVER + CONTRIBUTING + PROOFS):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def commands(program):
    examples = "\n".join(re.findall(r"```\n(.*?)```", DEPLOYMENT, re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in examples.splitlines() if line.startswith(f"{program} ")]
    return [shlex.split(line.removeprefix(program), comments=True) for line in lines]


def test_the_exit_codes_of_the_entry_point_are_explained():
    entrypoint = (DEPLOY / "container" / "entrypoint.sh").read_text()
    written = {int(code) for code in re.findall(r"^\| (\d\d) \|", DEPLOYMENT, re.MULTILINE)}
    assert written == {int(code) for code in re.findall(r"\bfail (\d+)", entrypoint)}


def test_the_commands_of_a_deployment_are_valid():
    pushed = commands("python deploy/push.py")
    assert len(pushed) == 2
    for arguments in pushed:
        push.main.make_context("push", arguments)
    for arguments in commands("docker build"):
        for argument in re.findall(r"--build-arg (\w+)=", " ".join(arguments)):
            assert f"\nARG {argument}" in DOCKERFILE
        assert (ROOT / arguments[arguments.index("-f") + 1]).is_file()
    (arguments,) = commands("docker run")
    mounts = {argument.split(":")[1] for argument in arguments if ":/" in argument}
    assert {"/repository", "/cache", "/etc/nv_tegra_release"} < mounts


def test_the_commands_of_open_questions_have_their_options():
    examples = [part.strip() for code in re.findall(r"`([^`\n]+)`", PROOFS) for part in code.split("&&")]
    found = [shlex.split(each)[1:] for each in examples if each.startswith("fewheads ")]
    assert len(found) > 10
    for name, *arguments in found:
        options = {option for parameter in COMMANDS[name].load().params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= options, (name, arguments)


def test_image_and_page_install_the_same_packages():
    """The extra `device` with the versions of the constraints, of which pycuda is one."""
    assert re.findall(r"^pycuda==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.search(r"pip wheel .*-c constraints\.txt pycuda$", DOCKERFILE, re.MULTILINE)
    for text in (DEPLOYMENT, DOCKERFILE.replace("\\\n", " "), (DEPLOY / "fewheads.service").read_text()):
        assert re.search(r"install .*-c constraints\.txt .*'\.\[device\]'", text)


def test_the_map_for_contributors_is_in_the_order_of_the_layers():
    tables = CONTRIBUTING.split("| package of `edge/` |")[1].split("| package of `export/` |")
    first = [row.split("|")[1] for table in tables for row in table.split("\n\n")[0].splitlines()[2:]]
    named = [name.removesuffix(".py") for cell in first for name in re.findall(r"`(\w+(?:\.py)?)/?`", cell)]
    order = [name for name in ORDER if name != "__main__"]
    assert named[: len(order)] == order
    assert named[len(order) :] == list(EXPORT_ORDER)


def test_the_tables_of_boards_are_made_from_their_records():
    records = map(device_table.read_record, sorted((ROOT / "deploy" / "device_records").glob("*.json")))
    table = SERVER.split(device_table.BEGIN)[1].split(device_table.END)[0]
    assert table.strip() == device_table.markdown(list(records))


def test_the_limits_page_computes_what_it_says():
    page = (REDUCTION / "LIMITS.md").read_text()
    d, lengths = 768, (128, 384, 512, 2048)
    layer = LayerShape(12, 64, 3072)
    parts = {
        "35 %": lambda n: 0.35 * n * d,
        "all logits": lambda n: n * d,
        "logits and weighted": lambda n: 2 * n * d,
        "logits with": lambda n: n * d + 2 * d * d,
        "the whole": lambda n: 2 * n * d + 4 * d * d,
    }
    for name, part in parts.items():
        (row,) = re.findall(rf"^\| {name}.*$", page, re.MULTILINE)
        bounds = [amdahl_bound(part(n) / macs_per_token(d, layer, n)) for n in lengths]
        assert re.findall(r"\d\.\d{3}", row) == [f"{bound:.3f}" for bound in bounds]
    for heads, width, units in ((12, 32, 3072), (8, 64, 2048), (6, 64, 1536), (3, 64, 768)):
        (row,) = re.findall(rf"^\| {heads} heads of {width}, {units:,} units.*$", page, re.MULTILINE)
        smaller = LayerShape(heads, width, units)
        ratios = [macs_per_token(d, layer, n) / macs_per_token(d, smaller, n) for n in (128, 512)]
        assert re.findall(r"\d\.\d{2}", row) == [f"{ratio:.2f}" for ratio in ratios]


@pytest.mark.parametrize("results", ["results", "restored"])
def test_the_measured_tables_of_glue_are_those_of_the_reports(results):
    report = (GLUE.parent / results / "report.md").read_text()
    table = report.split("| model |")[1].split("\n\n")[0]
    assert f"| model |{table}\n" in GLUE.read_text()


def test_the_ratio_of_looped_models_in_the_readme_is_that_of_their_page():
    page = (ROOT / "export/papers/looped/RESULTS.md").read_text()
    ((ratio, bounds),) = re.findall(r"^\| linear \| \d / \d \|.*\| ([\d.]+) \(([^|]+)\) \|$", page, re.MULTILINE)
    said = f"with {ratio} times the error of twelve layers with 600,385 ({bounds})"
    assert said in " ".join(README.split())


def test_the_speeds_on_an_orin_are_those_of_the_record():
    record = ROOT / "export/papers/frontier/boards/orin-nano-super-15W.json"
    rows = msgspec.json.decode(record.read_bytes())["rows"]
    points = {row["name"]: msgspec.convert(row["points"], tuple[PointTimes, ...]) for row in rows}
    speeds = {name: {(one.tokens, one.batch): one.speedup for one in found} for name, found in points.items()}
    tiers = ("half", "third", "quarter")
    published = [speeds[tier][32, 1] for tier in tiers]
    planned = [speeds[f"{tier}, planned for 32 tokens, batch 1"][32, 1] for tier in tiers]
    uniform, first = speeds["third-uniform"], speeds["third-first-layers"][32, 1]
    limits, glue = (" ".join(page.read_text().split()) for page in (REDUCTION / "LIMITS.md", GLUE))
    assert f"is {uniform[32, 1]:.2f} times as fast at 32 tokens and {uniform[128, 1]:.2f} times at 128" in limits
    third = speeds["third"]
    assert f"the searched third {third[32, 1]:.2f} and {third[128, 1]:.2f} times" in limits
    for tier, here, there in zip(tiers, published, planned, strict=True):
        assert f"| {tier} | {here:.2f} | {there:.2f} |" in limits
    assert f"are predicted to be {first:.2f} times as fast" in limits
    for found, text in ((published, "predicted to reach {}, {} and {}×."), (planned, "to reach {}, {} and {}× there")):
        assert text.format(*(f"{speed:.1f}" for speed in found)) in glue
    assert f"The first two of six layers are predicted to reach {first:.1f}×" in glue


def test_the_errors_of_predictions_are_those_of_the_fit():
    products, memory = (round(100 * ERRORS[regime].rms) for regime in ("products", "memory"))
    said = f"its network: {products} % RMS where products bind, {memory} % where memory does"
    assert f"[{len(published().measurements)} published measurements]" in PROOFS
    assert said in PROOFS
    factor = 1 + ERRORS["narrow"].band
    bands = f"from {1 / factor:.1f} to {factor:.2f} times the prediction"
    assert bands in " ".join((REDUCTION / "LIMITS.md").read_text().split())


def test_the_predictions_of_layers_are_those_of_today():
    record = read_latencies(reduce_tables.PREDICTED)
    assert record == reduce_tables.predicted(), "python -m export.reduce.tables writes them anew"


#: The commands that write documents from committed records.
WRITERS = (
    *(document, reduce_tables, restoration_tables, adaptive_tables, backward_tables, calculator_tables, looped_tables),
    families,
)


@pytest.mark.parametrize("module", WRITERS, ids=lambda module: module.__name__)
def test_the_documents_are_what_their_commands_make_of_the_records(module):
    for path, page in module.pages().items():
        assert page == path.read_text(), f"python -m {module.__name__} writes {path.name} anew"


def test_a_table_is_written_behind_its_marker_and_the_text_around_it_stays():
    marker = "<!-- table: records.json#b by make it -->"
    page = f"Text.\n\n{marker}\n\n{{}}| a | b |\n| --- | ---: |\n| {{}} |\n\nMore text.\n\n| a |\n| --- |\n"
    table = Table("", ("a", "b"), [("x", 2.0), ("y", Difference(1, (-1, 2)))], note="A note.")
    anew = with_tables(page.format("Another note.\n\n", "old | 1"), "make it", {"records.json#b": table})
    assert anew == page.format("A note.\n\n", "x | 2 |\n| y | +1.0 (-1.0 … +2.0)")
    assert with_tables(anew, "make it", {"records.json#b": table._replace(note="")}).startswith(
        f"Text.\n\n{marker}\n\n| a"
    )
    for other, message in (
        (page.replace("#b", ""), "a table behind records.json by make it, which makes none"),
        (page.replace("it -->", "that -->"), "0 tables behind <!-- table: records.json#b by make it"),
        (2 * anew, "2 tables behind <!-- table: records.json#b by make it"),
    ):
        with pytest.raises(ValueError, match=f"the document has {message}"):
            with_tables(other, "make it", {"records.json#b": table})


#: Pages of results, whose tables are those of a module in :data:`WRITERS` or of a test.
RESULTS = listed(*(f"export/*{name}.md" for name in ("RESULTS", "VARIATIONS", "LIMITS", "FAMILIES")))
#: Pages whose tables of figures each name a record and the command that recomputes them.
RECORDED = (
    *RESULTS,
    *("README.md", "export/estimate/README.md"),
    *("export/bundle/fewest_kernels/KERNELS.md", "export/bundle/pack/README.md"),
    *("deploy/peers/RESULTS.md", "deploy/boards/README.md"),
)
_MARKER = re.compile(r"^<!-- table: (.+) by (.+) -->$", re.MULTILINE)
_FIGURE = re.compile(r"\| *[*+~±<≤≈-]*\d")


def unmarked_tables(page):
    """Yield the first line of each table of figures, and the marker between the previous table and it."""
    above = 0
    page = page.partition("\n## The tables\n")[0]  # which tests/test_peers.py compares with its record
    for table in re.finditer(r"^\|.*\n\|[ :|-]+\n(?:\|.*(?:\n|$))+", page, re.MULTILINE):
        if any(_FIGURE.search(row) for row in table[0].splitlines()[2:]):
            yield table[0].splitlines()[0], next(_MARKER.finditer(page, above, table.start()), None)
        above = table.end()


@pytest.mark.parametrize("name", RECORDED)
def test_each_table_of_figures_names_its_record_and_command(name):
    tracked = set(listed())
    for head, marker in unmarked_tables((ROOT / name).read_text()):
        assert marker, f"{name}: no record is named between the table before and {head}"
        for record in marker[1].partition("#")[0].split(", "):
            assert record in tracked or any(file.startswith(f"{record}/") for file in tracked), (head, record)
        program, *arguments = shlex.split(marker[2])
        if name in RESULTS and program != "pytest":
            assert arguments[-1] in {module.__name__ for module in WRITERS}, (head, marker[2])
        if program == "fewheads":
            assert arguments[0] in COMMANDS, (head, arguments)
        elif program == "pytest":
            path, _, test = arguments[-1].partition("::")
            assert f"def {test}" in (ROOT / path).read_text(), (head, arguments)
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (head, arguments)
        else:
            path = f"{arguments[1].replace('.', '/')}" if arguments[0] == "-m" else arguments[0].removesuffix(".py")
            assert program == "python", (head, program)
            assert {f"{path}.py", f"{path}/__main__.py"} & tracked, (head, arguments)


_TEXTS = ("classifier of texts, or of pairs with `--pair`", "regression, cross-encoder", "classifier of tokens")
_FILES = ("`FILE.csv`", "`FILE.tsv`", "`FILE.jsonl`", "`FILE.parquet`", "a directory with `CLASS/NAME.png`")
#: The test that takes kinds of the documents by commands from a directory to a served answer, which it compares with
#: that of another program, or of torch for models of our own; where they are refused, the test of the refusal.
SERVED = {
    "generate_types.py::test_each_type_writes_the_texts_of_transformers": (
        *("GPT-2", "Gemma", "Llama", "Mistral", "Qwen2", "Models that generate text"),
    ),
    "imported.py::test_a_stock_client_gets_what_transformers_computes": (
        *("BERT", "RoBERTa", "XLM-RoBERTa", "MPNet", "DistilBERT", "ViT", *_TEXTS),
        *("question answering, also runs on SQuAD and own questions", "sentence embeddings"),
    ),
    "tasks_own_runs.py::test_each_format_reaches_a_served_answer": (
        *(*_FILES, "a directory with `train.csv` and perhaps `dev.csv`"),
        "a directory that `save_to_disk()` of Hugging Face's `datasets` wrote",
    ),
    "bundle_pack.py::test_bundle_with_real_inputs_is_served": ("operators of ONNX",),
    "bundle_pack_variants.py::test_control_flow_is_packed_as_it_is": ("`If`, `Loop`, `Scan`",),
    "bundle_pack_variants.py::test_a_detector_with_non_maximum_suppression_is_for_onnx_runtime": (
        "`NonZero`, `NonMaxSuppression`, `Unique`, `Compress`",
    ),
    "bundle_pack.py::test_text_in_and_out": ("operators of ONNX Runtime (`com.microsoft`, `ai.onnx.ml`), text",),
    "bundle_pack.py::test_models_that_would_not_serve": ("other operators",),
    "bundle_classifier.py::test_the_bundle_has_a_tier_for_each_run_and_precision_with_the_outputs_of_training": (
        *("GLUE", "Text models"),
    ),
    "tasks_squad.py::test_a_stock_client_gets_answers_of_a_run_and_on_request_its_logits": ("SQuAD",),
    "tasks_own_questions.py::test_a_served_bundle_answers_as_its_run_was_measured": (
        "a table with `question`, `context` and `answer`, or SQuAD's `.json`",
    ),
    "tasks_images.py::test_exported_run_reads_files_as_it_was_trained": ("images", "Image models"),
    "papers_looped_runs.py::test_tiers_of_bundles_compute_what_their_runs_do": ("Looped models",),
    "tests/system/test_calculator.py::test_the_gate_is_right_on_all_items_after_rounding": ("The calculators",),
}


def test_each_kind_that_the_documents_name_has_a_test_from_its_directory_to_a_served_answer():
    own, pack = ((ROOT / "export" / name / "README.md").read_text() for name in ("data", "bundle/pack"))
    named = re.findall(r"^- \*\*([A-Z][\w ]+)\*\* take `", SERVER, re.MULTILINE)
    texts = " ".join((README + SERVER + own + pack).split())
    for kinds in re.findall(r"of ((?:[\w-]+, )+[\w-]+ or [\w-]+) type", texts):
        named += re.split(r", | or ", kinds)
    (tasks,) = re.findall(r"Fine-tunes a Hugging Face model, .*?, on (.+?)\.", README)
    named += re.split(r", | or ", tasks)
    for page, heading in ((SERVER, "| model | sends | gets |"), (own, "| `--data` |"), (pack, "| the graph has |")):
        rows = page.split(heading)[1].split("\n\n")[0].splitlines()[2:]
        named += [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert set(named) == {kind for kinds in SERVED.values() for kind in kinds}
    for test in SERVED:
        path, name = test.split("::")
        path = path if "/" in path else f"tests/export/test_{path}"
        (found,) = re.findall(rf"^((?:@.*\n)*)def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
        assert "slow" not in found, test
