"""The wheels that a Jetson installs, resolved by pip for aarch64 and the device's Python on any machine.

pip evaluates environment markers for the Python that runs it, whatever ``--python-version`` says. So the constraints
are evaluated here, and what only the target's markers require is added until nothing is missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edge.errors import BackendError, Raw

ROOT = Path(__file__).parent.parent.parent
#: The extra of the project that lists what a Jetson installs.
DEVICE = "device"
#: Packages without wheels, and their requirements. The builder stage of jetson.Dockerfile compiles them.
SOURCE_ONLY = {"pycuda": ("mako", "platformdirs>=2.2", "pytools>=2011.2")}
#: manylinux tags name the oldest C library that a wheel accepts. 2.17 is the oldest one with aarch64.
_OLDEST_GLIBC_MINOR = 17
_MOST_ROUNDS = 5


class Target(NamedTuple):
    """A machine to install wheels on.

    Attributes:
        python: version of the interpreter, such as ``3.10``.
        glibc_minor: of the C library, such as 35 for 2.35.
        markers_python: version for which environment markers are evaluated; the same by default.
    """

    python: str
    glibc_minor: int
    markers_python: str = ""

    @property
    def markers(self) -> dict[str, str]:
        """The environment of the markers."""
        version = self.markers_python or self.python
        return {
            "python_version": version,
            "python_full_version": f"{version}.0",
            "platform_machine": "aarch64",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
        }

    @property
    def options(self) -> list[str]:
        """The options of pip that select wheels for this machine."""
        minors = range(self.glibc_minor, _OLDEST_GLIBC_MINOR - 1, -1)
        tags = [*(f"manylinux_2_{minor}_aarch64" for minor in minors), "manylinux2014_aarch64"]
        return [
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={self.python}",
            *(f"--platform={tag}" for tag in tags),
        ]


#: Ubuntu 22.04 with Python 3.10 and Ubuntu 24.04 with Python 3.12.
JETPACK_6, JETPACK_7 = Target("3.10", 35), Target("3.12", 39)


class Wheel(NamedTuple):
    """A wheel that pip chose: canonical name of the package, version, file name, and what it requires."""

    name: str
    version: str
    file: str
    requires: tuple[Requirement, ...]


def device_requirements(target: Target) -> list[Requirement]:
    """Return the requirements of the project and its extra ``device`` on the target.

    Packages without wheels are replaced by their requirements.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {canonicalize_name(name): lines for name, lines in project["optional-dependencies"].items()}
    own = canonicalize_name(project["name"])

    def expanded(lines: list[str]) -> Iterator[Requirement]:
        for line in lines:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            if name == own:
                for extra in sorted(requirement.extras):
                    yield from expanded(extras[canonicalize_name(extra)])
            elif _applies(requirement, target):
                yield from map(Requirement, SOURCE_ONLY[name]) if name in SOURCE_ONLY else [requirement]

    return list(expanded([*project["dependencies"], *extras[DEVICE]]))


def tested_versions(target: Target) -> list[str]:
    """Return the lines of ``constraints.txt`` that apply to the target, without markers."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [f"{pin.name}{pin.specifier}" for pin in pins if _applies(pin, target)]


def resolve(requirements: list[Requirement], target: Target, constraints: list[str]) -> dict[str, Wheel]:
    """Return the wheels that satisfy the requirements and all that these require on the target, by name.

    Args:
        requirements: what to install; requirements whose markers do not apply to the target are ignored.
        target: the machine to install on.
        constraints: pins, as :func:`tested_versions`.

    Raises:
        BackendError: some package has no wheel for the target, or versions conflict.
    """
    wanted = [_plain(requirement) for requirement in requirements if _applies(requirement, target)]
    for _ in range(_MOST_ROUNDS):
        wheels = _report(wanted, target, constraints)
        missing = {
            _plain(requirement)
            for wheel in wheels.values()
            for requirement in wheel.requires
            if _applies(requirement, target) and not _satisfied(requirement, wheels)
        }
        if not missing:
            return wheels
        wanted += sorted(missing)
    raise BackendError(
        f"wheels for Python {target.python} on aarch64",
        given=Raw(f"{', '.join(sorted(missing))} still missing after {_MOST_ROUNDS} resolutions"),
        expected="a complete set",
        fix="Look at the markers of what requires them.",
    )


def install(wheels: dict[str, Wheel], target: Target, directory: Path) -> None:
    """Install exactly these wheels into an empty or missing directory, which is left unfinished on failure.

    Raises:
        BackendError: a wheel is not available.
    """
    pins = [f"{wheel.name}=={wheel.version}" for wheel in wheels.values()]
    _pip(["--no-deps", f"--target={directory}", *target.options, *pins], target)


def _report(wanted: list[str], target: Target, constraints: list[str]) -> dict[str, Wheel]:
    with tempfile.TemporaryDirectory(prefix="fewheads-") as scratch:
        pins, report = Path(scratch) / "constraints.txt", Path(scratch) / "report.json"
        pins.write_text("\n".join(constraints))
        where = ["--dry-run", "--ignore-installed", f"--report={report}", f"--target={scratch}/none"]
        _pip([*where, f"--constraint={pins}", *target.options, *wanted], target)
        items = json.loads(report.read_text())["install"]
    wheels = {}
    for item in items:
        name = canonicalize_name(item["metadata"]["name"])
        requires = tuple(map(Requirement, item["metadata"].get("requires_dist", [])))
        file = item["download_info"]["url"].rpartition("/")[2]
        wheels[name] = Wheel(name, item["metadata"]["version"], file, requires)
    return wheels


def _pip(arguments: list[str], target: Target) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise BackendError(
            f"wheels for Python {target.python} on aarch64",
            given=Raw(errors[0] if errors else f"exit code {done.returncode} of pip"),
            expected="a wheel of each package",
            fix="Correct the versions in pyproject.toml and constraints.txt, or try again if the index did not answer.",
        )


def _applies(requirement: Requirement, target: Target) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**target.markers, "extra": ""})


def _satisfied(requirement: Requirement, wheels: dict[str, Wheel]) -> bool:
    wheel = wheels.get(canonicalize_name(requirement.name))
    return wheel is not None and requirement.specifier.contains(wheel.version, prereleases=True)


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return re.sub(r"\s", "", f"{requirement.name}{extras}{requirement.specifier}")
