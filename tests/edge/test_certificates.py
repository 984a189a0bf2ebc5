"""Certificates from files: what is wrong is said, what is doubtful is said and served."""

from __future__ import annotations

import logging
import os
import ssl
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge.errors import UsageError
from edge.security.certificates import read_certificates
from edge.security.credentials import ServerCertificates, call_metadata, channel_credentials, read_token
from tests.support.secured_servers import Authority

NOW = datetime.now(timezone.utc)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refused(chain: Path, key: Path, client_ca: Path | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_certificates(chain, key, client_ca)
    assert caught.value.fix.endswith(".")
    assert "-----" not in str(caught.value)
    return caught.value


def test_a_good_pair(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    chain, key = authority.issue()
    certificates = read_certificates(chain, key, authority.file)
    assert (certificates.chain, certificates.key) == (chain.read_bytes(), key.read_bytes())
    assert certificates.problem() == ""
    assert certificates.http.verify_mode is ssl.CERT_REQUIRED
    assert read_certificates(chain, key, None).http.verify_mode is ssl.CERT_NONE
    assert not caplog.records
    assert "PRIVATE" not in repr(certificates)


@pytest.mark.parametrize(
    ("from_days", "to_days", "problem"),
    [
        (-9, -1, "has expired"),
        (1, 30, "is not valid yet; is the clock right?"),
        (-9, 3, "expires in 3.0 days"),
        (-9, 15, ""),
    ],
)
def test_dates(
    authority: Authority, caplog: pytest.LogCaptureFixture, from_days: int, to_days: int, problem: str
) -> None:
    chain, key = authority.issue(not_before=NOW + timedelta(from_days), not_after=NOW + timedelta(to_days))
    told = f"the TLS certificate {problem}" if problem else ""
    with caplog.at_level(logging.WARNING):
        assert read_certificates(chain, key, None).problem() == told
    assert caplog.messages == ([f"--tls-certificate {chain}: {told}"] if told else [])


def test_a_key_that_others_may_read(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    chain, key = authority.issue()
    key.chmod(0o640)
    read_certificates(chain, key, None)
    assert caplog.messages == [f"--tls-key {key}: others than its owner may read it; chmod 600 closes it"]


def test_a_key_of_another_certificate(authority: Authority) -> None:
    chain, _ = authority.issue()
    _, other = authority.issue("other")
    error = refused(chain, other)
    assert (error.subject, error.expected) == ("--tls-key", f"the key of {chain}")


def test_a_missing_file(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue()
    none = tmp_path / "none"
    assert refused(none, key).subject == "--tls-certificate"
    assert refused(chain, none).subject == "--tls-key"
    assert refused(chain, key, none).subject == "--tls-client-ca"
    assert "No such file" in str(refused(none, key))
    assert "Is a directory" in str(refused(tmp_path, key))


def test_what_is_no_pem(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue()
    binary = tmp_path / "binary"
    first, end, _ = chain.read_text().partition("-----END CERTIFICATE-----")
    binary.write_bytes(ssl.PEM_cert_to_DER_cert(first + end))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    huge = tmp_path / "huge"
    huge.write_bytes(chain.read_bytes() + b"\n" * 2**20)
    for wrong in (binary, pipe, huge):
        assert refused(wrong, key).expected == "a file of PEM blocks, at most 1 MiB"


def test_what_is_pem_of_something_else(authority: Authority) -> None:
    chain, key = authority.issue()
    assert refused(key, key).subject == "--tls-certificate and --tls-key"
    assert refused(chain, chain).subject == "--tls-certificate and --tls-key"
    assert refused(chain, key, key).subject == f"--tls-client-ca {key}"


def test_a_key_with_a_passphrase(authority: Authority, tmp_path: Path) -> None:
    """It must be refused, and not ask at the terminal."""
    chain, key = authority.issue()
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    assert "without a passphrase" in str(refused(chain, locked))


def test_a_certificate_that_the_server_follows(authority: Authority) -> None:
    chain, key = authority.issue()
    files = ServerCertificates(chain, key, None)
    first = files.now
    assert files.now is first
    key.write_bytes(authority.issue("other")[1].read_bytes())
    assert files.now is first
    assert files.problem.startswith("--tls-key: got ")
    assert files.problem.endswith("What was read before stays in force.")
    key.write_bytes(first.key)
    assert files.problem == ""
    authority.issue(not_after=NOW - timedelta(1), not_before=NOW - timedelta(9))
    assert files.problem == "the TLS certificate has expired"
    chain.unlink()
    assert "No such file" in files.problem


def test_credentials_of_a_client(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue("client")
    assert channel_credentials() is not None
    assert channel_credentials(authority.file, chain, key) is not None
    for half in ({"tls_certificate": chain}, {"tls_key": key}):
        with pytest.raises(UsageError, match="both or none"):
            channel_credentials(**half)
    with pytest.raises(UsageError, match="--tls-ca"):
        channel_credentials(tmp_path / "none")
    with pytest.raises(UsageError, match="of another certificate"):
        channel_credentials(None, chain, authority.issue()[1])


def test_the_token_of_a_client(tmp_path: Path) -> None:
    assert call_metadata("") == ()
    assert call_metadata("abc") == (("authorization", "Bearer abc"),)
    file = tmp_path / "token"
    file.write_text("fewheads_abc\n")
    file.chmod(0o600)
    assert read_token(file) == "fewheads_abc"


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"x" * 5000, b"a\nb"])
def test_no_token_of_a_client(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(UsageError, match="one token and nothing else") as caught:
        read_token(file)
    assert "words" not in str(caught.value)


def test_a_token_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="mode 644: others may read it"):
        read_token(file)
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "none")
