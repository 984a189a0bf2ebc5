"""Certificates, keys and tokens from files: invalid files are rejected, doubtful ones are reported and served."""

import os
import ssl
import subprocess
import time
from datetime import datetime, timedelta, timezone

import pytest

from edge.client.connection import channel_credentials
from edge.errors import UsageError
from edge.security.certificates import ServerCertificates, read_certificates
from edge.security.tokens import read_token
from edge.security.watched import Watched
from tests.support.secured_servers import Authority, write_private

NOW = datetime.now(timezone.utc)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def rejected(chain, key, client_ca=None):
    with pytest.raises(UsageError) as caught:
        read_certificates(chain, key, client_ca)
    assert "-----" not in str(caught.value)
    return str(caught.value)


def test_valid_certificates_give_no_warning(authority, caplog):
    chain, key = authority.issue()
    certificates = read_certificates(chain, key, authority.file)
    assert (certificates.chain, certificates.key) == (chain.read_bytes(), key.read_bytes())
    assert certificates.problem() == ""
    assert certificates.http.minimum_version is ssl.TLSVersion.TLSv1_2
    assert certificates.http.verify_mode is ssl.CERT_REQUIRED
    assert read_certificates(chain, key, None).http.verify_mode is ssl.CERT_NONE
    assert not caplog.records
    assert "PRIVATE" not in repr(certificates)


def test_certificate_outside_its_dates_is_reported(authority, caplog):
    for from_days, to_days, problem in (
        (-9, -1, "has expired"),
        (1, 30, "is not valid yet; is the clock right?"),
        (-9, 13.9, "expires in 13.9 days"),
        (-9, 14.1, ""),
    ):
        caplog.clear()
        chain, key = authority.issue(not_before=NOW + timedelta(from_days), not_after=NOW + timedelta(to_days))
        message = f"the TLS certificate {problem}" if problem else ""
        assert read_certificates(chain, key, None).problem() == message
        assert caplog.messages == ([f"--tls-certificate {chain}: {message}"] if message else [])


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_key_that_is_readable_is_reported(authority, caplog, mode):
    chain, key = authority.issue()
    key.chmod(mode)
    read_certificates(chain, key, None)
    assert caplog.messages == [f"--tls-key {key}: users other than its owner may read it; run chmod 600"]


def test_files_that_are_not_certificates_are_rejected(authority, tmp_path):
    (chain, key), (_, other) = authority.issue(), authority.issue("other")
    none, binary, pipe, huge = (tmp_path / name for name in ("none", "binary", "pipe", "huge"))
    mismatch = f"{other}, of another certificate, expected the key of {chain}. Give the key that {chain} was made for."
    for files, message in (
        ((chain, other), f"--tls-key: got {mismatch}"),
        ((none, key), f"--tls-certificate {none}: got No such file or directory, expected a readable file"),
        ((chain, none), f"--tls-key {none}: got No such file"),
        ((chain, key, none), f"--tls-client-ca {none}: got No such file"),
        ((tmp_path, key), f"--tls-certificate {tmp_path}: got Is a directory"),
        ((key, key), "--tls-certificate and --tls-key: got "),
        ((chain, chain), "--tls-certificate and --tls-key: got "),
        ((chain, key, key), f"--tls-client-ca {key}: got something else, expected PEM cert"),
    ):
        assert rejected(*files).startswith(message)
    first, end, _ = chain.read_text().partition("-----END CERTIFICATE-----")
    binary.write_bytes(ssl.PEM_cert_to_DER_cert(first + end))
    os.mkfifo(pipe)
    huge.write_bytes(chain.read_bytes().ljust(2**20, b"\n"))
    read_certificates(huge, key, None)
    huge.write_bytes(chain.read_bytes().ljust(2**20 + 1, b"\n"))
    for wrong in (binary, pipe, huge):
        assert f"{wrong}, which has no PEM block, expected a file of PEM blocks, at most 1 MiB" in rejected(wrong, key)


def test_text_around_the_blocks_is_ignored(authority):
    chain, key = authority.issue()
    pure = read_certificates(chain, key, authority.file)
    for path in (chain, key, authority.file):
        around = "\ufeff# Z\u00fcrich\r\n".encode(), b"\n\xff issued by \x00\n"
        path.write_bytes(path.read_bytes().join(around))
    found = read_certificates(chain, key, authority.file)
    assert (found.chain, found.key, found.client_ca) == (pure.chain, pure.key, pure.client_ca)
    assert found.problem() == ""
    assert found.http.verify_mode is ssl.CERT_REQUIRED
    authority.file.write_bytes(b"-----BEGIN CERTIFICATE-----\n\xfc\n-----END CERTIFICATE-----\n")
    assert rejected(chain, key, authority.file).startswith(f"--tls-client-ca {authority.file}: got something else")


def test_unexpected_error_keeps_the_previous_value(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("1")
    watched = Watched("the file", [file], lambda: 6 // int(file.read_text()), 0.0)
    for wrong, error in (("0", "ZeroDivisionError"), ("three", "ValueError")):
        caplog.clear()
        file.write_text(wrong)
        assert watched.value == 6
        assert watched.problem == (
            f"the file: got {error}, expected files to read. See the server's log. The previous version stays in force."
        )
        assert ["Traceback" in caplog.text, len(caplog.records)] == [True, 1]
    file.write_text("2")
    assert (watched.value, watched.problem) == (3, "")


def test_files_are_read_again_after_an_error_that_was_not_theirs(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("1")
    files = [file]
    watched = Watched("the file", [file], lambda: files[0].read_text(), 0.0)
    file.write_text("22")
    files.clear()  # as if no further file could be opened
    assert (watched.value, "IndexError" in watched.problem) == ("1", True)
    files.append(file)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 10)
    assert (watched.value, watched.problem) == ("22", "")


def test_key_with_a_passphrase_is_rejected_without_a_prompt(authority, tmp_path):
    chain, key = authority.issue()
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    assert "without a passphrase" in rejected(chain, locked)


def test_server_follows_its_certificate(authority):
    chain, key = authority.issue()
    files = ServerCertificates(chain, key, None)
    first = files.value
    key.write_bytes(authority.issue("other")[1].read_bytes())
    assert files.value is first
    assert files.problem.startswith("--tls-key: got ")
    assert files.problem.endswith("The previous version stays in force.")
    key.write_bytes(first.key)
    assert files.problem == ""
    authority.issue(not_after=NOW - timedelta(1), not_before=NOW - timedelta(9))
    assert files.value.chain == chain.read_bytes()
    assert files.problem == "the TLS certificate has expired"
    chain.unlink()
    assert "No such file" in files.problem


def test_invalid_certificates_of_a_client_are_rejected(authority, tmp_path):
    chain, key = authority.issue("client")
    assert channel_credentials(authority.file, chain, key) is not None
    for files, message in (
        ((None, chain), "got --tls-certificate alone, expected both or none"),
        ((None, None, key), "got --tls-key alone, expected both or none"),
        ((tmp_path / "none",), "--tls-ca"),
        ((None, chain, authority.issue()[1]), "of another certificate"),
    ):
        with pytest.raises(UsageError, match=message):
            channel_credentials(*files)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"\x7f", b"x" * 4097, b"a\nb"])
def test_invalid_token_of_a_client_is_rejected(tmp_path, content):
    file = tmp_path / "token"
    write_private(file, content)
    with pytest.raises(UsageError) as caught:
        read_token(file)
    assert str(caught.value) == (
        f"--token-file {file}: got {len(content)} bytes of another form, expected one token and nothing else. "
        "Write the token into it, and `chmod 600` it."
    )


def test_token_file_must_be_readable_by_its_owner_alone(tmp_path):
    file = tmp_path / "token"
    token = "!~" + "x" * 4093
    write_private(file, f"{token}\n".encode())
    assert read_token(file) == token
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(UsageError, match=f"got mode {mode:o}: others may read it"):
            read_token(file)
    with pytest.raises(UsageError, match="got No such file or directory, expected a readable file"):
        read_token(tmp_path / "none")
