"""Names of users, which go only with a line in CHANGELOG.md, and the server of the files that a board gets."""

import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache

import click

from tests.compatibility.paths import DATA, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it, too

#: The last version before the data's commit.
_BEFORE = "0.1.0"
#: Wider than any line of a help text, so that each option has one line.
_WIDTH = 1000
#: ``python -m edge`` of the first directory on Python's path: the installed package would hide that a file is missing.
_RUN = """
import os, runpy, edge
assert edge.__path__ == [os.path.join(os.environ["PYTHONPATH"], "edge")], edge.__path__
runpy.run_module("edge", run_name="__main__", alter_sys=True)
"""


@cache
def new_entries():
    """Return what is in backticks in each entry of CHANGELOG.md that the data's commit did not have yet."""
    known = set(json.loads((DATA / "changelog.json").read_text()))
    later = (ROOT / "CHANGELOG.md").read_text().partition("## Unreleased\n")[2].partition(f"\n## [{_BEFORE}]")[0]
    later = re.sub("^#.*$", "", later, flags=re.MULTILINE)  # headings are no part of the entry above
    entries = [" ".join(entry.split()) for entry in re.split(r"^- ", later, flags=re.MULTILINE)]
    return [
        " ".join(re.findall("`(.+?)`", entry))
        for entry in entries
        if hashlib.sha256(entry.encode()).hexdigest()[:12] not in known
    ]


def announced(*names):
    """Return whether such an entry has all of these names, of commands, options or imports, in backticks."""
    patterns = [rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names]
    return any(all(re.search(pattern, entry) for pattern in patterns) for entry in new_entries())


def commands(command, name="fewheads"):
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found, below
            yield from commands(found, f"{name} {below}")


def help_of(name, command):
    command._help_option = None  # kept since an earlier call, of a test with other names of it
    widths = {"max_content_width": _WIDTH, "terminal_width": _WIDTH}
    return command.get_help(click.Context(command, info_name=name, help_option_names=["-h", "--help"], **widths))


def facts(text):
    """Return what a help text states of its arguments (under "") and of each option: type, default, range, variable."""
    found = {"": {text.splitlines()[0]}}
    text = re.sub(r"\n {20,}", "  ", text)  # a long option has its text below
    for line in re.findall(r"^  (-.+)$", text, re.MULTILINE):
        spelling, *rest = re.split(r"  +", line)
        names = re.findall(r"(?:^|[ /,])(--?[a-z][\w-]*)", spelling)
        brackets = "; ".join(re.findall(r"\[(.+?)\]", " ".join(rest)))
        found |= {name: {spelling, *filter(None, brackets.split("; "))} for name in names}
    return found


def signatures(kind):
    """Return the parameters, with their defaults, of a function or of a class and its methods; else the value."""
    if not callable(kind):
        return {"": [repr(kind)]}
    methods = inspect.getmembers(kind, callable) if inspect.isclass(kind) else []
    found = {}
    for name, function in [("", kind), *((name, method) for name, method in methods if name[0] != "_")]:
        parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
        found[name] = [str(one.replace(annotation=one.empty)) for one in parameters]
    return found


def types(families):
    return {
        family.name: [family.type, *sorted({label for sample in family.samples for label in sample.labels})]
        for family in families
    }


def copy_image(directory):
    """Copy the files that jetson.Dockerfile copies, add the entry points, and return the directory."""
    for line in re.findall(r"^COPY (?!--from)(.+)$", (ROOT / "jetson.Dockerfile").read_text(), re.MULTILINE):
        *sources, target = [word for word in line.split() if not word.startswith("--")]
        for source in map(ROOT.joinpath, sources):
            place = directory / target.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    install_commands(directory)
    return directory


def install_commands(directory):
    """Write the entry points of pyproject.toml as pip would; first on Python's path, they hide installed ones."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fewheads.commands"]
    metadata = directory / "fewheads-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fewheads\nVersion: 0\n")
    lines = [f"{name} = {point}" for name, point in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[fewheads.commands]", *lines, ""]))


@contextmanager
def server(image, repository, cache):
    """Serve a repository with nothing but the files of an image, and yield what the server announces."""
    command = [sys.executable, "-c", _RUN, "serve", str(repository), "--grpc-port=0", "--metrics-port=0", "--json"]
    command += ["--target=onnxruntime", f"--cache={cache}"]
    environment, pipe = {"PYTHONPATH": str(image), "PATH": ""}, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cache, env=environment) as process:
        try:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            yield json.loads(line)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0
