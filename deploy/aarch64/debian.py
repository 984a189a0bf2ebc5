"""Packages of this Debian or Ubuntu release for another architecture, unpacked into a directory.

apt runs with state and caches of its own below that directory and with the distribution's mirrors, keys and proxies of
this machine's configuration. Nothing is installed on the machine, and no root is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from edge.errors import BackendError, Raw, UsageError

_LISTS_SECONDS = 24 * 3600.0
_FORMAT = "$(REPO_URI) $(RELEASE) $(COMPONENT)"


class Packages:
    """Downloads and unpacks packages of one architecture.

    Args:
        directory: for apt's state, the downloads, and the files of the packages in ``root``; kept for the next run.
        architecture: Debian's name of it, such as ``arm64``.
        sources: an apt list of mirrors that have the architecture; None takes this machine's.

    Raises:
        UsageError: apt is missing, or no mirror of the distribution is configured.
    """

    def __init__(self, directory: Path, architecture: str, sources: Path | None = None) -> None:
        for program in ("apt-get", "dpkg-deb"):
            if not shutil.which(program):
                fix = "Run it on Debian or Ubuntu, for example in a container."
                raise UsageError("aarch64", given=Raw(f"no {program}"), expected=f"{program} on this machine", fix=fix)
        self.root = directory / "root"
        self._architecture = architecture
        self._archives = directory / "apt" / "archives"
        self._lists = directory / "apt" / "lists"
        for path in (self._archives / "partial", self._lists / "partial", self.root):
            path.mkdir(parents=True, exist_ok=True)
        status, listed = directory / "apt" / "status", directory / "apt" / "sources.list"
        status.touch()
        listed.write_text(sources.read_text() if sources else _own_sources(architecture))
        self._configuration = directory / "apt" / "apt.conf"
        self._configuration.write_text(
            f'APT::Architecture "{architecture}";\n'
            f'APT::Architectures {{ "{architecture}"; }};\n'
            'APT::Install-Recommends "false";\n'
            'Acquire::Languages "none";\n'
            f'Dir::Etc::SourceList "{listed.absolute()}";\n'
            'Dir::Etc::SourceParts "/dev/null";\n'
            f'Dir::State "{(directory / "apt").absolute()}";\n'
            f'Dir::State::status "{status.absolute()}";\n'
            f'Dir::Cache "{(directory / "apt").absolute()}";\n'
            f'APT::Sandbox::User "{_user()}";\n'
        )

    def unpack(self, names: Sequence[str]) -> Path:
        """Unpack packages and their dependencies; return the root of their files.

        Scripts of the packages do not run. Packages that are unpacked already are skipped.

        Raises:
            BackendError: apt cannot get a package.
        """
        if time.time() - _modified(self._lists / "updated") > _LISTS_SECONDS:
            self._apt("update")
            (self._lists / "updated").touch()
        self._apt("install", "--yes", "--download-only", *names)
        for archive in sorted(self._archives.glob("*.deb")):
            done = archive.with_suffix(".unpacked")
            if not done.exists():
                subprocess.run(["dpkg-deb", "--extract", archive, self.root], check=True)
                done.touch()
        return self.root

    def _apt(self, *arguments: str) -> None:
        environment = {**os.environ, "APT_CONFIG": str(self._configuration), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            ["apt-get", "-q", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        problems = [line for line in done.stderr.splitlines() if line.startswith("E: ")]
        if done.returncode or problems:
            raise BackendError(
                f"{self._architecture} packages, apt-get {arguments[0]}",
                given=Raw(problems[0].removeprefix("E: ") if problems else f"exit code {done.returncode}"),
                expected=f"a mirror with {self._architecture}",
                fix="Check the network, or name mirrors that have this architecture with --sources FILE.",
            )


def _own_sources(architecture: str) -> str:
    """Return this machine's mirrors of its own release, without those of third parties."""
    command = ["apt-get", "indextargets", f"--format={_FORMAT}", "Identifier: Packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    codename = _codename()
    own = sorted({line for line in lines if line.split()[1].split("-")[0] == codename})
    if not own:
        given = Raw(f"no mirror of {codename or 'a release that /etc/os-release names'}")
        fix = "Name mirrors with --sources FILE."
        raise UsageError("the apt sources of this machine", given=given, expected="the distribution's mirrors", fix=fix)
    return "".join(f"deb [arch={architecture}] {line}\n" for line in own)


def _codename() -> str:
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _user() -> str:
    """Return the user for apt's downloads, who may write into the directory."""
    return "root" if os.geteuid() == 0 else ""
