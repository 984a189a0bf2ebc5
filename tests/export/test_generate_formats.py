import json
import os
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import UsageError
from export.data import expressions as calculator
from export.errors import DataError
from export.generate.formats import (
    Example,
    Source,
    normalised,
    parse_answer,
    parse_number,
    read_source,
    same_answer,
    source_of,
)
from export.papers.backward.generate_mathematics import distinct
from tests.support.task_data import real

SCRIPT = Path(__file__).parents[2] / "export" / "papers" / "backward" / "generate_mathematics.py"
GSM8K = {
    "question": "How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24,000.\nSo $<<24000=24000>>24,000.\n#### 24,000",
}
OPENMATH = {"problem": "One half?", "generated_solution": "#### Step 1\n\\boxed{1/2}", "expected_answer": "1/2"}


def texts(name, path):
    """Return the texts of the only file of a source."""
    (examples,) = read_source(Source(name, str(path))).values()
    return [example.text_before + example.completion for example in examples]


def test_every_format_becomes_the_same_text_without_byte_order_marks_and_blank_lines(tmp_path):
    for name, row in (("gsm8k", GSM8K), ("openmath", {**OPENMATH, "problem_source": "math"})):
        (tmp_path / name).write_text(f"\ufeff{json.dumps(row)}\n\n")
    (tmp_path / "mathematics").write_text("\ufeffWhat is 1 + 1?\r\n2\r\nSort 3, 1.\n1, 3\n")
    expected = {
        "gsm8k": ["Question: How many?\nAnswer: She sold 48/2 = 24,000.\nSo $24,000. #### 24000"],
        "openmath": ["Question: One half?\nAnswer: Step 1\n\\boxed{1/2} #### 1/2"],
        "mathematics": ["Question: What is 1 + 1?\nAnswer: #### 2", "Question: Sort 3, 1.\nAnswer: #### 1, 3"],
    }
    assert {name: texts(name, tmp_path / name) for name in expected} == expected


def test_the_answers_of_the_calculator_are_whole_numbers():
    first = calculator.load()["val"].expressions[0]
    assert texts("calculator", "val")[0].startswith(f"Question: {first}\nAnswer: #### ")
    (examples,) = read_source(Source("calculator", "long")).values()
    assert len(examples) == 700
    for example in examples:
        assert int(example.answer) == eval(example.prompt)


def test_a_directory_is_read_file_by_file_up_to_a_limit(tmp_path):
    for split, module, items in (("train", "b", 3), ("train", "a", 1), ("test", "a", 2)):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"{module}.txt").write_text("".join(f"{number}?\n{number}\n" for number in range(items)))
    (tmp_path / "settings.json").write_text("{}")
    files = read_source(Source("mathematics", str(tmp_path)), limit=2)
    assert {name: len(examples) for name, examples in files.items()} == {"test/a": 2, "train/a": 1, "train/b": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", b'{"question"', "line 1: got Input data was truncated, expected the texts question, answer"),
        ("gsm8k", json.dumps(GSM8K).encode() + b'\n{"question": "a"}', "line 2: got Object missing required field"),
        ("gsm8k", b'{"question": "a", "answer": "nothing marked"}', "line 1: got 'nothing marked', expected an answer"),
        ("gsm8k", b'{"question": "a", "answer": "\xff"}', r"line 1: got b'\xff', expected text in UTF-8"),
        ("gsm8k", b"", "line 1: got the end of the file, expected an example"),
        ("openmath", json.dumps(GSM8K).encode(), "expected the texts problem, generated_solution, expected_answer"),
        ("openmath", json.dumps(OPENMATH | {"expected_answer": " "}).encode(), "got ' ', expected an expected_answer"),
        ("mathematics", b"one?\n \n", "line 1: got a question without an answer"),
        ("mathematics", b"one?\n1\ntwo?\n", "line 3: got a question without an answer"),
        ("mathematics", b"one?\n1\n\n2\n", "line 3: got an empty line, expected a question, and its answer on"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(name, content, message, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_source(Source(name, str(path)))
    assert str(caught.value).startswith(f"{path} line")
    assert message in str(caught.value)
    assert str(caught.value).endswith("Repair or remove the line, or get the file again.")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("openmath:absent", DataError, r"nothing there, expected files that end in \.jsonl or \.parquet"),
        ("mathematics:.", DataError, r"a directory without such files, expected files that end in \.txt"),
        ("calculator:test", DataError, "got 'test', expected one of train, val, in_range"),
        *(
            (wrong, UsageError, "expected FORMAT:PATH with a format of gsm8k, openmath, mathematics")
            for wrong in ("gsm9k:file", "gsm8k", "gsm8k:")
        ),
    ],
)
def test_data_that_are_not_there_are_refused(source, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        read_source(source_of(source))
    assert source_of("gsm8k:C:/data") == Source("gsm8k", "C:/data")


def test_parquet_is_read_like_jsonl_by_a_package(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([OPENMATH]), tmp_path / "rows.parquet")
    (tmp_path / "lines.jsonl").write_text(json.dumps(OPENMATH))
    assert texts("openmath", tmp_path / "rows.parquet") == texts("openmath", tmp_path / "lines.jsonl")
    parquet.write_table(pyarrow.table({"problem": ["a"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 1: .* expected the texts problem.* Repair or remove the row"):
        read_source(Source("openmath", str(tmp_path)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"expected the package pyarrow\. Install it with pip install pyarrow"):
        read_source(Source("openmath", str(tmp_path)))


def test_all_of_gsm8k_has_numbers_as_answers():
    for split, items in (("train", 7473), ("test", 1319)):
        (examples,) = read_source(Source("gsm8k", str(real("gsm8k", f"{split}.jsonl")))).values()
        assert len(examples) == items
        assert all(parse_number(example.answer) is not None for example in examples)
        assert not any("<<" in example.solution or "####" in example.solution for example in examples)


@given(st.text(), st.text(st.characters(blacklist_characters="#", blacklist_categories=["Z", "C"]), min_size=1))
def test_the_answer_is_read_from_any_completion(solution, answer):
    completion = Example("?", solution, answer).completion
    assert parse_answer(completion) == normalised(answer)
    assert parse_answer(f"{completion}\nQuestion: more #### 5") == normalised(answer)
    assert completion.count("####") == 1


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("5", None),
        ("####", None),
        ("#### \n5", None),
        ("#### 1,234,567.5 \n6", "1234567.5"),
        ("####  -7,  50", "-7, 50"),
        ("#### $24,000.", "$24000."),
        *((f"#### {text}", text) for text in ("(1,234)", "[1,200]", "1,2,3,100", "12,34", "1,234,5")),
    ],
)
def test_an_answer_is_normalised(written, answer):
    assert parse_answer(written) == answer


@given(st.fractions(max_denominator=10**6), st.integers(-(10**12), 10**12))
def test_numbers_are_read_exactly(fraction, integer):
    assert parse_number(str(fraction)) == fraction
    assert parse_number(normalised(f"{integer:,}")) == integer
    assert same_answer(f"{integer}.0", str(integer))
    assert not same_answer(f"{integer}.0", str(integer + 1))


NUMBERS = {
    "$12": 12, "-$1.5": -1.5, "50%": 50, ".25": 0.25, "+3.": 3, "$-5": -5, r"\$12": 12, r"50\%": 50, "1{,}234": 1234,
    r"\$1,\!234.50": 1234.5, r"\frac{1}{2}": 0.5, r"-3\dfrac{1}{2}": -3.5, "3 1/2": 3.5, "\N{MINUS SIGN}4": -4,
}  # fmt: skip
NO_NUMBERS = ("3 12", r"\frac{1}{0}", r"\frac{x}{2}", "", "-", "1/0", "1/2/3", "1, 2", "True", "--1", "1e5", "٣", None)


@pytest.mark.parametrize(("written", "number"), [*NUMBERS.items(), *((text, None) for text in (*NO_NUMBERS, "9" * 65))])
def test_numbers_are_read_from_latex_too_and_what_is_no_number_is_none(written, number):
    assert parse_number(written) == (None if number is None else Fraction(number))


def test_generated_questions_are_distinct_and_end_with_the_supply():
    drawn = iter(["a", "b", "a", "x" * 161, "c", *["a"] * 20_000])
    known = {"b"}
    assert list(distinct(lambda: (next(drawn), "1"), 5, known)) == [("a", "1"), ("c", "1")]
    assert known == {"a", "b", "c"}
    assert list(distinct(lambda: ("d", "1" * 31), 1, set())) == []


def generate(python, *arguments):
    command = [python, "-W", "ignore", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--per-module", 2), "--per-module: got 2, expected 3 or more, one of each level. Give 3000."),
        ((), "expected the package. Install it as --help says."),
    ],
)
def test_the_generator_writes_no_split_without_questions_and_names_a_missing_package(options, message, tmp_path):
    if not options and find_spec("mathematics_dataset") is not None:
        pytest.skip("mathematics_dataset is installed")
    done = generate(sys.executable, "--modules", "numbers__gcd", *options, "--out", tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.rglob("*.txt"))


def test_the_generator_writes_the_same_files_again_and_no_test_question_to_train_on(tmp_path):
    python = os.environ.get("FEWHEADS_MATHEMATICS_PYTHON")
    if python is None:
        pytest.skip(f"set FEWHEADS_MATHEMATICS_PYTHON to a Python with the packages that {SCRIPT.name} names")
    options = ("--modules", "comparison__closest,algebra__linear_1d", "--per-module", 600, "--per-test", 100)
    for place in ("one", "two"):
        assert generate(python, *options, "--out", tmp_path / place).returncode == 0
    one, two = (
        {path.relative_to(place): path.read_text() for path in place.rglob("*.txt")}
        for place in (tmp_path / "one", tmp_path / "two")
    )
    assert one == two
    assert len(one) == 9  # five splits, one of them without harder equations
    for module in ("closest", "linear_1d"):
        questions = [line for path, text in one.items() if module in path.name for line in text.splitlines()[::2]]
        assert len(set(questions)) == len(questions)
    assert "Give another --out." in generate(python, *options, "--seed", 1, "--out", tmp_path / "one").stderr
    done = generate(python, "--modules", "numbers__gdc", "--out", tmp_path / "three")
    assert "Did you mean numbers__gcd?" in done.stderr
