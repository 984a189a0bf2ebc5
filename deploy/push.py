"""Push bundles to a board: copy, verify, switch, wait until the server has loaded them, and revert if it has not.

    python deploy/push.py BUNDLE... --to jetson:/srv/fewheads/repository --url 127.0.0.1:8001
    python deploy/push.py --back NAME --to jetson:/srv/fewheads/repository --url 127.0.0.1:8001

A bundle is copied over ssh into a directory that servers ignore, because its name starts with a dot. An interrupted
copy resumes with the missing files. When every SHA-256 matches the manifest, the bundle is renamed to NAME-VERSION, and
earlier versions of its model to hidden names. The server serves those until it has loaded and checked the new version.
If that fails, takes too long, or is interrupted, the renames are reverted. The last earlier version stays on the board,
and `--back` returns to it.

The board needs sh, tar and sha256sum.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

import click
import msgspec

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import MANIFEST_NAME
from edge.cli.options import connection_options
from edge.client import Client
from edge.client.connection import Credentials
from edge.client.retries import ONCE
from edge.errors import BundleError, FewheadsError, Raw, ServerError, UsageError
from edge.files import sha256

_POLL_SECONDS = 0.5
_PREVIOUS, _INCOMING = ".previous", ".incoming"
# Scripts for the board's sh. $1 is the repository.
_LIST = """cd -- "$1" && for manifest in */manifest.json .*.previous/manifest.json; do
    if [ -f "$manifest" ]; then printf '%s\\0' "${manifest%/*}"; cat -- "$manifest"; printf '\\0'; fi
done"""
_HASHES = 'mkdir -p -- "$1/$2" && cd -- "$1/$2" && find . -mindepth 1 -maxdepth 1 -type f -exec sha256sum {} +'
_UNPACK = 'cd -- "$1/$2" && tar --extract --file - --no-same-owner'
_VERIFY = 'cd -- "$1/$2" && sha256sum --check --strict --quiet - 1>&2 && chmod 755 . && chmod 644 -- * && sync'
#: Moves FROM to TO for each pair whose FROM exists, so that a repetition changes nothing.
_MOVE = """set -e; cd -- "$1"; shift
while [ $# -gt 1 ]; do
    if [ -e "$1" ]; then
        if [ "${2#.}" != "$2" ]; then rm -rf -- "$2"; fi
        mv -T -- "$1" "$2"
    fi
    shift 2
done; sync"""
_REMOVE = 'cd -- "$1" && shift && rm -rf -- "$@"'


class _Key(msgspec.Struct, frozen=True):
    name: str
    version: int


class Installed(NamedTuple):
    """A bundle on the board: its directory, and the name and version in its manifest."""

    directory: str
    name: str
    version: int


class Board:
    """A repository on a board, or on this machine.

    Args:
        destination: ``[USER@]HOST:DIRECTORY``, or a directory of this machine.
        ssh: the ssh command.
    """

    def __init__(self, destination: str, ssh: str) -> None:
        host, colon, directory = destination.rpartition(":")
        if (colon and not host) or not directory.startswith("/"):
            fix = "Give the repository's whole path, such as jetson:/srv/fewheads/repository."
            raise UsageError("--to", given=destination, expected="HOST:/DIRECTORY or /DIRECTORY", fix=fix)
        self.name = destination
        self._repository = directory
        self._shell = [*shlex.split(ssh), host] if host else []

    def run(self, script: str, *arguments: str, stdin: bytes = b"", expected: str = "a writable repository") -> bytes:
        """Run a script, whose first argument is the repository, and return its output.

        Raises:
            ServerError: the board cannot be reached, or the script fails.
        """
        with self._start(script, *arguments) as process:
            output, message = process.communicate(stdin)
        self._check(process.returncode, message, expected)
        return output

    def bundles(self) -> list[Installed]:
        """Return the bundles of the repository, and the previous versions that it keeps."""
        parts = self.run(_LIST).split(b"\0")[:-1]
        found = []
        for directory, manifest in zip(parts[::2], parts[1::2], strict=True):
            try:
                key = msgspec.json.decode(manifest, type=_Key)
            except msgspec.DecodeError:  # the server reports a broken bundle
                continue
            found.append(Installed(directory.decode(), key.name, key.version))
        return found

    def hashes(self, directory: str) -> dict[str, str]:
        """Return the SHA-256 of each file of a directory, which is created if it is missing."""
        lines = self.run(_HASHES, directory).decode().splitlines()
        return {name.removeprefix("./"): digest for digest, name in (line.split(maxsplit=1) for line in lines)}

    def copy(self, directory: str, files: Iterable[Path]) -> None:
        """Copy files into a directory.

        Raises:
            ServerError: the connection ended, or the disk is full.
        """
        process = self._start(_UNPACK, directory)
        assert process.stdin is not None
        try:
            _pack(files, process.stdin)
        except BrokenPipeError:
            pass  # its exit code and message give the reason
        finally:
            process.stdin = None
            _, message = process.communicate()
        self._check(process.returncode, message, "a whole copy")

    def _start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", script, "push", self._repository, *arguments]
        whole = [*self._shell, shlex.join(command)] if self._shell else command
        return subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _check(self, code: int, message: bytes, expected: str) -> None:
        if code:
            given = Raw(message.decode(errors="replace").strip() or f"exit code {code}")
            fix = "Push again: the copy resumes. The server still serves what it served before."
            raise ServerError(f"board {self.name}", given=given, expected=expected, fix=fix)


def _pack(files: Iterable[Path], stream: IO[bytes]) -> None:
    with stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in files:
            size = path.stat().st_size
            shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
            click.echo(f"  {path.name}, {shown}", err=True)
            archive.add(path, arcname=path.name, recursive=False)


class Server:
    """The server of the board.

    Args:
        load: whether to request each load, as under ``--model-control explicit``.
        restart: the command that restarts the server; empty if it follows its repository.
        wait_seconds: the longest time until a model is ready.
    """

    def __init__(self, client: Client, board: Board, load: bool, restart: str, wait_seconds: float) -> None:
        self._client = client
        self._board = board
        self._load = load
        self._restart = restart
        self._wait_seconds = wait_seconds

    def state(self, name: str, version: int) -> tuple[str, str]:
        """Return the state of a model and its reason. The state is empty if the server is silent or lacks the model."""
        try:
            index = self._client.index()
        except ServerError as error:
            return "", f"{error.subject} does not answer; is the server running, and its port forwarded to --url?"
        found = [one for one in index if (one["name"], one["version"]) == (name, str(version))]
        return (found[0]["state"], found[0]["reason"]) if found else ("", "the server does not know it")

    def follow(self, wanted: Installed, gone: Installed | None = None) -> None:
        """Wait until the server has loaded a bundle.

        Args:
            wanted: the bundle.
            gone: a removed bundle, whose failure the server must no longer report.

        Raises:
            ServerError: the server cannot load it, or not in time.
        """
        if self._restart:
            self._board.run(f"{self._restart} 1>&2")
        if self._load:
            self._client.load(wanted.name, timeout_seconds=self._wait_seconds)
        click.echo(f"  waiting up to {self._wait_seconds:g} s for the server to load it", err=True)
        until, shown = time.monotonic() + self._wait_seconds, ""
        while True:
            state, reason = self.state(wanted.name, wanted.version)
            status = f"{state} {reason}".strip()
            if status != shown:  # during a build the reason is its progress
                click.echo(f"  {status}", err=True)
                shown = status
            if state == "READY" and not (gone and self.state(gone.name, gone.version)[0]):
                return
            if (state == "UNAVAILABLE" and not gone) or time.monotonic() > until:
                subject, expected = f"{wanted.name} version {wanted.version}", f"READY within {self._wait_seconds:g} s"
                raise ServerError(subject, given=Raw(status), expected=expected, fix="Read the server's log.")
            time.sleep(_POLL_SECONDS)


def push(bundle: Bundle, board: Board, server: Server) -> None:
    """Make a bundle the served version of its model.

    Raises:
        BundleError: the board has another bundle of this name and version.
        ServerError: the copy failed, or the server did not load it. The earlier version is served.
    """
    manifest = bundle.manifest
    wanted = Installed(f"{manifest.name}-{manifest.version}", manifest.name, manifest.version)
    expected = {name: record.sha256 for name, record in manifest.files.items()}
    expected[MANIFEST_NAME] = sha256((bundle.path / MANIFEST_NAME).read_bytes())
    there = board.bundles()
    present = [one for one in there if one.directory == wanted.directory or one[1:] == wanted[1:]]
    present = [one for one in present if not one.directory.startswith(".")]
    others = [one for one in there if one.name == wanted.name and one not in present]
    earlier = [one for one in others if not one.directory.startswith(".")]
    incoming = None if present else f".{wanted.directory}{_INCOMING}"
    click.echo(f"{wanted.directory} to {board.name}", err=True)
    if incoming:
        _copy(bundle.path, expected, board, incoming)
    elif board.hashes(present[0].directory) != expected:
        fix = "Export it with a higher version: fewheads export --version."
        given = Raw(f"another bundle in {present[0].directory}")
        raise BundleError(f"{wanted.directory} on {board.name}", given=given, expected="none, or this one", fix=fix)
    else:
        click.echo("  is there already", err=True)
    _switch(board, server, wanted, incoming, earlier)
    kept = {one.directory for one in others if one.directory.startswith(".")} - {_previous(one) for one in earlier}
    if kept and earlier:
        board.run(_REMOVE, *kept)
    click.echo(f"{wanted.directory} is served", err=True)


def go_back(name: str, board: Board, server: Server) -> None:
    """Serve the previous version of a model again.

    Raises:
        UsageError: the board has none.
        ServerError: the server did not load it.
    """
    there = [one for one in board.bundles() if one.name == name]
    previous = [one for one in there if one.directory.startswith(".")]
    if not previous:
        fix = "Push the bundle of that version."
        given = Raw(f"none of {name!r} on {board.name}")
        raise UsageError("--back", given=given, expected="a model with a previous version", fix=fix)
    kept = previous[-1]
    wanted = kept._replace(directory=kept.directory.removeprefix(".").removesuffix(_PREVIOUS))
    _switch(board, server, wanted, kept.directory, [one for one in there if one not in previous])
    click.echo(f"{wanted.directory} is served", err=True)


def _previous(bundle: Installed) -> str:
    return f".{bundle.directory}{_PREVIOUS}"


def _copy(source: Path, expected: dict[str, str], board: Board, incoming: str) -> None:
    """Copy the missing and wrong files of a bundle into the directory of incoming files."""
    found = board.hashes(incoming)
    wrong = [name for name, digest in found.items() if expected.get(name) != digest]
    if wrong:
        board.run(_REMOVE, *(f"{incoming}/{name}" for name in wrong))
    board.copy(incoming, [source / name for name in expected if name not in found or name in wrong])
    lines = "".join(f"{digest}  {name}\n" for name, digest in expected.items())
    board.run(_VERIFY, incoming, stdin=lines.encode(), expected="the SHA-256 of its manifest for each file")


def _switch(board: Board, server: Server, wanted: Installed, source: str | None, earlier: list[Installed]) -> None:
    """Rename a bundle to its place and hide the earlier ones; revert this if the server does not load it."""
    moves = [(one.directory, _previous(one)) for one in earlier]
    if source:
        moves.insert(0, (source, wanted.directory))
    board.run(_MOVE, *(name for move in moves for name in move))
    try:
        server.follow(wanted)
    except (ServerError, KeyboardInterrupt) as error:
        board.run(_MOVE, *(name for there, here in reversed(moves) for name in (here, there)))
        if isinstance(error, KeyboardInterrupt):
            raise
        if source and source.endswith(_INCOMING):
            board.run(_REMOVE, source)
        fix = f"{_served_again(server, wanted, earlier)} {error.fix}"
        raise ServerError(error.subject, given=error.given, expected=error.expected, fix=fix) from error


def _served_again(server: Server, failed: Installed, earlier: list[Installed]) -> str:
    """Wait until the server serves the earlier version again, and return a sentence about it."""
    if not earlier:
        return "The board has no earlier version."
    try:
        server.follow(earlier[0], gone=failed)
    except ServerError:
        return f"Version {earlier[0].version} is in its place again, but the server does not serve it."
    return f"Version {earlier[0].version} is served again."


@click.command()
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path), metavar="[BUNDLE]...")
@click.option("--to", required=True, metavar="[HOST:]DIRECTORY", help="The repository.")
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="The server that serves it.")
@click.option("--back", metavar="NAME", help="Go back to the previous version of a model.")
@click.option("--ssh", default="ssh", show_default=True, help="The command of the connection, with its options.")
@click.option("--load", is_flag=True, help="Request the load, for a server with --model-control explicit.")
@click.option("--restart", default="", metavar="COMMAND", help="The command that restarts the server on the board.")
@click.option("--wait-seconds", default=1800.0, show_default=True, help="Time for the server to load a model.")
@connection_options
def main(
    bundles: tuple[Path, ...],
    to: str,
    url: str,
    back: str | None,
    ssh: str,
    load: bool,
    restart: str,
    wait_seconds: float,
    credentials: Credentials | None,
) -> None:
    """Push BUNDLEs to the repository of a board.

    A server with --model-control poll follows its repository. For other servers use --load or --restart.
    """
    try:
        if bool(bundles) == bool(back):
            given = Raw("both" if back else "neither")
            raise UsageError("BUNDLE and --back", given=given, expected="one of them", fix="Try: --help")
        opened = [Bundle.open(path) for path in bundles]
        with Client(url, credentials=credentials, retries=ONCE) as client:
            board = Board(to, ssh)
            server = Server(client, board, load, restart, wait_seconds)
            for bundle in opened:
                push(bundle, board, server)
            if back:
                go_back(back, board, server)
    except FewheadsError as error:
        click.echo(f"push: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
