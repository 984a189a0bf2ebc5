"""deploy/README.md and deploy/JETSON.md agree with the files and commands that they describe."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points

from deploy import push
from tests.support.tools import DEPLOY, ROOT

PAGE = (DEPLOY / "README.md").read_text()
PROOFS = (DEPLOY / "JETSON.md").read_text()
DOCKERFILE = (ROOT / "jetson.Dockerfile").read_text()
ENTRYPOINT = (DEPLOY / "container" / "entrypoint.sh").read_text()


def commands(program: str) -> list[list[str]]:
    examples = "\n".join(re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in examples.splitlines() if line.startswith(f"{program} ")]
    return [shlex.split(line.removeprefix(program), comments=True) for line in lines]


def test_exit_codes() -> None:
    written = {int(code) for code in re.findall(r"^\| (\d\d) \|", PAGE, re.MULTILINE)}
    assert written == {int(code) for code in re.findall(r"\bfail (\d+)", ENTRYPOINT)}


def test_files_and_headings() -> None:
    for name in re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", PAGE + PROOFS):
        assert (DEPLOY / name).exists(), name
    for name in re.findall(r"\b(?:tests|edge|deploy)/[\w/]+\.\w+", PROOFS):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"^\| (`.*?`) ", PAGE, re.MULTILINE)[0].replace("`", "").split(", "):
        assert (DEPLOY / name).exists(), name


def test_commands() -> None:
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


def test_commands_of_open_questions() -> None:
    known = {point.name: point for point in entry_points(group="fewheads.commands")}
    examples = [part.strip() for code in re.findall(r"`([^`\n]+)`", PROOFS) for part in code.split("&&")]
    found = [shlex.split(each)[1:] for each in examples if each.startswith("fewheads ")]
    assert len(found) > 10
    for name, *arguments in found:
        options = {option for parameter in known[name].load().params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= options, (name, arguments)
    for target in re.findall(r"\bmake ([\w-]+)", PROOFS):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_image_and_page_install_the_same_packages() -> None:
    """The extra `device` with the versions of the constraints, of which pycuda is one."""
    assert re.findall(r"^pycuda==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.search(r"pip wheel .*-c constraints\.txt pycuda$", DOCKERFILE, re.MULTILINE)
    for text in (PAGE, DOCKERFILE.replace("\\\n", " "), (DEPLOY / "fewheads.service").read_text()):
        assert re.search(r"install .*-c constraints\.txt .*'\.\[device\]'", text)
