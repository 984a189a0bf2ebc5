"""Certificates, tokens, and servers that require them."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
import trustme

from edge.client.connection import channel_credentials
from edge.security.tokens import new_token
from edge.server import Ready
from tests.support.commands import SECONDS
from tests.support.models import ORACLE_BUNDLE

HOST = "127.0.0.1"


class Authority:
    """A certificate authority, and the files of its certificates in a directory."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        self._directory = directory
        self.file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name="server", *, hosts=(HOST, "localhost"), **dates):
        """Write ``<name>.pem`` and ``<name>.key``, replacing those that exist; ``dates`` are those of trustme."""
        leaf = self._ca.issue_cert(*hosts, common_name=name, **dates)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        write_private(key, leaf.private_key_pem.bytes())
        return certificate, key


Pair = tuple[Path, Path]


def write_private(path, content):
    scratch = path.with_suffix(".new")
    scratch.touch(0o600)
    scratch.write_bytes(content)
    scratch.replace(path)


def tokens_file(path, **scopes):
    """Write a file of new tokens, one for each name, and return them."""
    made = {name: new_token(name, of) for name, of in scopes.items()}
    write_private(path, b"".join(msgspec.json.encode(line) + b"\n" for _, line in made.values()))
    return {name: secret for name, (secret, _) in made.items()}


@contextmanager
def logging_server(repository, log, *arguments):
    """Serve a repository while the block runs; the server's stderr goes to a file."""
    command = [sys.executable, "-m", "edge", "serve", str(repository), "--grpc-port=0", "--metrics-port=0", "--json"]
    with open(log, "wb") as stderr:
        process = subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=stderr)
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            yield msgspec.json.decode(line, type=Ready)
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
    assert process.returncode == 0, log.read_text()


class Secured(NamedTuple):
    """A server with mutual TLS and tokens, its files, and the certificate of a client."""

    ready: Ready
    log: Path
    authority: Authority
    own: Pair
    client: Pair
    tokens: dict[str, str]

    @property
    def url(self):
        return f"{HOST}:{self.ready.grpc_port}"

    def channel(self):
        return secure_channel(self.ready.grpc_port, self.authority, self.client)


@contextmanager
def secured_server(directory, *arguments, **scopes):
    """Serve the oracle while the block runs; files in ``directory`` have the names of their tokens."""
    authority = Authority(directory / "authority")
    own, client = authority.issue(), authority.issue("client")
    for path in (*own, authority.file):  # comments in any encoding are no part of the blocks
        path.write_bytes("# Z\u00fcrich\n".encode() + path.read_bytes() + "# M\u00fcnchen\n".encode("latin-1"))
    tokens = tokens_file(directory / "tokens", **scopes)
    for name, token in tokens.items():
        write_private(directory / name, token.encode())
    (directory / "repository").mkdir()
    (directory / "repository" / "oracle").symlink_to(ORACLE_BUNDLE, target_is_directory=True)
    options = [f"--tls-certificate={own[0]}", f"--tls-key={own[1]}", f"--tls-client-ca={authority.file}"]
    options += [f"--tokens={directory / 'tokens'}", f"--cache={directory / 'cache'}"]
    with logging_server(directory / "repository", directory / "log", *options, *arguments) as ready:
        yield Secured(ready, directory / "log", authority, own, client, tokens)


def secure_channel(port, authority, own=None):
    certificate, key = own or (None, None)
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"{HOST}:{port}", channel_credentials(authority.file, certificate, key), options)


def bearer(token):
    return (("authorization", f"Bearer {token}"),)
