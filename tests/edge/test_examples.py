"""Examples of deploy/examples and of the READMEs, run against a real server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from edge.__main__ import cli
from tests.support.commands import SECONDS, closed_address
from tests.support.letters_model import NAME, PROMPT, continued
from tests.support.models import ORACLE

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "deploy" / "examples"
CPP_TOOLS = ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin")
QUESTION = "3 - -4 + 2"


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture
def closed_url():
    with closed_address() as address:
        yield address


def test_blocking_client(url, closed_url):
    done = run(sys.executable, EXAMPLES / "ask.py", ORACLE, QUESTION, closed_url, url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "3 - -4 + 2 = 9"
    assert lines[1].startswith(f"from {url} after 2 attempts")
    assert lines[3] == "1 + 1 = 2"
    assert lines[4].startswith("1 + = expression: got '1 +'")
    assert lines[5] == "2 + 2 = 4"


def test_asyncio_and_stock_clients(url):
    done = run(sys.executable, EXAMPLES / "ask_async.py", ORACLE, url, QUESTION, "1 +", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["3 - -4 + 2 = 9", "1 + = INVALID_ARGUMENT after 1 attempts", "2 = 2"]
    done = run(sys.executable, EXAMPLES / "ask_tritonclient.py", ORACLE, QUESTION, url)
    assert (done.returncode, done.stdout) == (0, "3 - -4 + 2 = 9\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", ["README.md", "edge/README.md"])
def test_curl(http_url, page):
    (command,) = re.findall(r"^curl [^' ]+/v2/[^']+'[^']+'$", (ROOT / page).read_text(), re.MULTILINE)
    command = command.replace("127.0.0.1:8000", http_url).replace("calculator-gate", ORACLE)
    done = run("sh", "-c", f"{command} --silent --fail-with-body")
    assert done.returncode == 0, done.stdout
    shown = json.loads(done.stdout)
    assert shown["outputs"][0]["data"] == [9]
    assert shown["parameters"]["compute_infer_ns"] > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_completions(writer):
    page = (ROOT / "edge" / "README.md").read_text()
    for ours, theirs in (("127.0.0.1:8000", f"127.0.0.1:{writer.http_port}"), ("writer", NAME), ("Once upon", PROMPT)):
        page = page.replace(ours, theirs)
    (command,) = re.findall(r"^curl [^' ]+/v1/completions[^']+'[^']+'$", page, re.MULTILINE)
    done = run("sh", "-c", f"{command} --silent --fail-with-body")
    assert json.loads(done.stdout)["choices"][0]["text"] == continued(PROMPT, 40)
    pytest.importorskip("openai", reason="the second example asks with OpenAI's client")
    (program,) = re.findall(r"^```python\n(from openai .+?)^```$", page, re.MULTILINE | re.DOTALL)
    printed = run(sys.executable, "-c", program.replace("seed=1", "temperature=0"))
    assert (printed.stdout, printed.stderr) == (continued(PROMPT, 40), "")


def test_grpcurl_requests(url, channel):
    """Send the requests of grpcurl.sh, with message types from reflection."""
    script = (EXAMPLES / "grpcurl.sh").read_text()
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    called = [word for word in script.split() if word.count("/") == 1 and word.count(".") >= 1 and word[0].islower()]
    methods = [pool.FindServiceByName(word.split("/")[0]).methods_by_name[word.split("/")[1]] for word in called]
    assert [method.name for method in methods] == ["Check", "ModelMetadata", "ModelInfer", "Get"]
    requests = ["{}", json.dumps({"name": ORACLE}), (EXAMPLES / "request.json").read_text(), "{}"]
    answers = []
    for path, method, data in zip(called, methods, requests, strict=True):
        request = json_format.Parse(data, GetMessageClass(method.input_type)(), descriptor_pool=pool)
        call = channel.unary_unary(
            f"/{path}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answers.append(call(request, timeout=10))
    assert np.frombuffer(answers[2].raw_output_contents[0], "<f4") == 9
    assert json.loads(json_format.MessageToJson(answers[1]))["name"] == ORACLE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(any(shutil.which(tool) is None for tool in CPP_TOOLS), reason=f"needs {', '.join(CPP_TOOLS)}")
def test_cpp(url, closed_url, tmp_path):
    environment = {**os.environ, "BUILD": str(tmp_path / "build"), "CXXFLAGS": "-O0 -Werror"}
    made = subprocess.run(
        ["make", "-f", EXAMPLES / "Makefile"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    ask = tmp_path / "build" / "ask"
    done = run(ask, url, ORACLE, QUESTION)
    assert (done.returncode, done.stdout) == (0, "9\n")
    wrong = run(ask, url, ORACLE, "3 -")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "status 3: expression: got '3 -'" in wrong.stderr
    assert "status 14" in run(ask, closed_url, ORACLE, QUESTION).stderr
    assert run(ask).returncode == 2


def test_options_in_the_pages_exist():
    context, options, option = click.Context(cli), {}, re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        own = [command, *getattr(command, "commands", {}).values()]  # of a group, those of its commands, too
        parameters = [each for one in own for each in one.get_params(context)]
        options[name] = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
    of_others = {"--into", "--streaming", "--shared-memory", "--input-data", "--collect-metrics", "--cacert"}
    of_others |= {"--unix-socket", "--model-repository", "--model-control-mode", "--model-id"}
    pages = ("README.md", "edge/README.md", "deploy/COMING_FROM.md")
    text = "\n".join((ROOT / page).read_text() for page in pages)
    assert set(option.findall(text)) <= of_others.union(*options.values())
    # In a line of code, they are options of its command.
    for code in re.findall(r"`([^`\n]+)`|^(fewheads .+)$", text, re.MULTILINE):
        words = "".join(code).partition("#")[0].split()
        if len(words) > 1 and words[0] == "fewheads" and words[1] in options:
            assert set(option.findall(" ".join(words))) <= options[words[1]], words


def test_readme_and_help_list_the_same_exit_codes():
    explained = " ".join((cli.epilog or "").partition("\n\n")[0].split())
    assert explained.startswith("Exit codes: 0 done, ")
    assert explained in " ".join((ROOT / "README.md").read_text().split())
