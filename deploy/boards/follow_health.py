"""Active health checks for open-source nginx: boards that are not ready are marked ``down`` in its configuration.

    python follow_health.py /etc/fewheads/nginx.conf --pid-file /run/nginx.pid

nginx notices only boards that do not answer, not those that answer UNAVAILABLE while they load, drain or hang. This
program checks the ``grpc.health.v1`` of each board, which needs no token, and lets nginx reload its configuration after
a change, which interrupts no request or stream. While no board is ready, none is marked. It must be able to write the
directory of the configuration and to signal nginx.
"""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.client.connection import Credentials, channel_credentials, open_channel
from edge.files import write_whole

_SERVER = re.compile(r"^(\s*server\s+)([^\s;{]+)(\s+down)?(?=[\s;])(?!\s*\{)", re.MULTILINE)


def is_ready(server: str, credentials: Credentials | None, timeout_seconds: float) -> bool:
    """Return whether a board reports SERVING."""
    # A shared connection that has failed would wait before it reconnects.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with open_channel(server, credentials, grpc, options) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def servers_of(written: str) -> list[str]:
    """Return the addresses of a configuration's ``server`` lines."""
    return list(dict.fromkeys(found[2] for found in _SERVER.finditer(written)))


def marked(written: str, ready: dict[str, bool]) -> str:
    """Return the configuration with servers that are not ready marked ``down``; none is marked if none is ready."""
    some = any(ready.values())
    return _SERVER.sub(
        lambda found: found[1] + found[2] + ("" if ready.get(found[2], True) or not some else " down"), written
    )


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--pid-file", type=click.Path(path_type=Path), default=Path("/run/nginx.pid"), show_default=True)
@click.option("--interval-seconds", type=float, default=1.0, show_default=True)
@click.option("--tls-ca", type=click.Path(path_type=Path), help="PEM; connect with TLS.")
def main(config: Path, pid_file: Path, interval_seconds: float, tls_ca: Path | None) -> None:
    """Follow the health of the boards in CONFIG until SIGTERM."""
    credentials = Credentials(tls=channel_credentials(tls_ca)) if tls_ca else None
    click.echo(f"following {', '.join(servers_of(config.read_text()))}", err=True)
    with ThreadPoolExecutor() as pool:
        while True:
            written = config.read_text()
            servers = servers_of(written)
            answers = pool.map(lambda server: is_ready(server, credentials, interval_seconds), servers)
            ready = dict(zip(servers, answers, strict=True))
            changed = marked(written, ready)
            if changed != written:
                write_whole(config, changed.encode())
                os.kill(int(pid_file.read_text()), signal.SIGHUP)
                click.echo(f"down: {', '.join(server for server in servers if not ready[server]) or 'none'}", err=True)
            time.sleep(interval_seconds)


if __name__ == "__main__":
    main()
