"""How settings are declared, and those of a port of metrics, which a server and an exporter share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from edge.errors import Raw, UsageError
from edge.instruments.logs import FORMATS, LEVELS

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a setting, beside its type and default."""

    help: str  # its text in the help of a command
    least: float | None = None  # the smallest allowed number; None sets no bounds
    most: float = math.inf  # the largest allowed number
    choices: tuple[str, ...] = ()  # the allowed words; empty allows any
    fix: str = "Leave it out for the default."  # the way out of a wrong value
    unset: str = ""  # the meaning of an empty default or None
    option: str = ""  # its option; empty derives it from the field's name
    variable: str | tuple[str, ...] | None = None  # its environment variables; None derives one from the option
    metavar: str | None = None  # the name of its value in help; None derives it from the type
    parse: Callable[[str], object] | None = None  # parses its value; None parses it by the type

    def option_for(self, name: str) -> str:
        """Return the command-line option of a setting by its name."""
        return self.option or f"--{name.replace('_', '-')}"

    def problem(self, option: str, value: Any) -> UsageError | None:
        """Return the error of a value outside the bounds or choices, and None of a good one."""
        if self.choices and value not in self.choices:
            return UsageError(option, given=value, expected=f"one of {', '.join(self.choices)}", fix=self.fix)
        if self.least is not None and not self.least <= value <= self.most:  # this form refuses NaN too
            expected = f"{self.least} or more" if self.most == math.inf else f"{self.least} to {self.most}"
            return UsageError(option, given=value, expected=expected, fix=self.fix)
        return None


def setting(default: T, help: str, **rest: Any) -> T:
    """Return a dataclass field with a :class:`Declaration`."""
    return field(default=default, metadata={"declaration": Declaration(help=help, **rest)})


def port_setting(default: T, help: str, **rest: Any) -> T:
    """Return the field of a port."""
    return setting(default, help, least=0, most=65535, fix="Take a free port, or 0 for any.", **rest)


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """The settings of a port of metrics; a UsageError lists all that are wrong."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    metrics_port: int | None = port_setting(
        8002, "Port of Prometheus metrics, and of a server's live page; 0 takes any free one."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Name, beside local ones, for which a server without TLS and tokens on a loopback address answers over HTTP, "
        "such as the one that a proxy passes on; may be repeated.",
        unset="none",
        option="--allow-host",
        metavar="NAME",
    )
    tls_certificate: Path | None = setting(
        None, "PEM; serve over TLS with this certificate. It is read again when it changes.", unset="no TLS"
    )
    tls_key: Path | None = setting(None, "PEM; the key of --tls-certificate.")
    tls_client_ca: Path | None = setting(None, "PEM; accept only clients with a certificate from these authorities.")
    tokens: Path | None = setting(
        None, "Accept only clients with a token in this file of `fewheads token`. It is read again when it changes."
    )
    log_level: str = setting("info", "Lowest level of logged messages.", choices=LEVELS)
    log_format: str = setting(
        "default", "Format of the log; ISO8601 is in UTC, json writes an object per line.", choices=tuple(FORMATS)
    )

    def __post_init__(self) -> None:
        """Check every value, and the rules for combinations of them."""
        declared = declarations_of(type(self))
        values = ((name, getattr(self, name)) for name in declared)
        problems = (
            declared[name].problem(declared[name].option_for(name), value)
            for name, value in values
            if value is not None
        )
        wrong = [*filter(None, problems), *self.broken_rules()]
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            fix = "\n  ".join(["Correct each:", *map(str, wrong)])
            raise UsageError(f"{len(wrong)} settings", given=Raw("wrong values"), expected="none", fix=fix)

    def checks_hosts(self) -> bool:
        """Return whether only the place of the server keeps strangers out, to which a web page's name may lead."""
        return _is_loopback(self.host) and not self.tls_certificate and not self.tokens

    def exposure_warnings(self) -> list[str]:
        """Return what a stranger on the network can do with these settings; empty if only this host connects."""
        if _is_loopback(self.host) or not self.opens_port():
            return []
        warnings = []
        if not self.tokens and not self.tls_client_ca:
            fix = "--tokens or --tls-client-ca accepts only known clients"
            warnings.append(f"anyone who reaches it may send requests; {fix}")
        if not self.tls_certificate:
            readable = "requests, responses and tokens" if self.tokens else "requests and responses"
            warnings.append(f"{readable} can be read on the way; --tls-certificate encrypts them")
        return [f"{self.host} is not a loopback address, and {each}" for each in warnings]

    def opens_port(self) -> bool:
        """Return whether anything listens on ``host``."""
        return self.metrics_port is not None

    def broken_rules(self) -> Iterator[UsageError]:
        """Yield the errors of rules beyond the bounds and choices of one setting."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            given = Raw("--tls-key alone" if self.tls_certificate is None else "--tls-certificate alone")
            fix = "Give both, or leave both out."
            yield UsageError("--tls-certificate and --tls-key", given=given, expected="both or none", fix=fix)
        if self.tls_client_ca and not self.tls_certificate:
            given, fix = Raw("no --tls-certificate"), "Give the server a certificate too."
            yield UsageError("--tls-client-ca", given=given, expected="--tls-certificate and --tls-key", fix=fix)


def declarations_of(settings: type[PageSettings]) -> dict[str, Declaration]:
    """Return the declaration of each setting, by the name of its field."""
    return {each.name: each.metadata["declaration"] for each in fields(settings)}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
