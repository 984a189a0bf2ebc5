"""Prometheus with the shipped configuration: alerts, and every query of the dashboard on running servers."""

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from edge import errors
from edge.client import Client, text
from edge.client.retries import ONCE
from edge.errors import ServerError
from edge.settings import Settings
from tests.support.boards import orin_nano
from tests.support.metrics import wait_until
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import parameter
from tests.support.server_processes import served
from tests.support.text_model import write_sentiment_bundle
from tests.support.tools import DEPLOY, run, tool

yaml = pytest.importorskip("yaml")
INSTALL = "apt-get install prometheus"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
RULES = CONFIG.with_name("rules.yml")
GRAFANA = DEPLOY / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "fewheads.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
#: Longer than twelve scrapes.
SECONDS = 90.0


def test_promtool_accepts_the_configuration_and_alerts_fire_as_in_rules_test():
    promtool, rules_test = tool("promtool", INSTALL), Path(__file__).parent / "rules_test.yml"
    for command in (("check", "config", CONFIG), ("check", "rules", RULES), ("test", "rules", rules_test)):
        done = run(promtool, *command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_reasons_in_alerts_exist():
    """An alert on an unknown reason would never fire."""
    named = {word for found in re.findall(r'reason[!=]~"([^"]+)"', RULES.read_text()) for word in found.split("|")}
    assert named
    assert {name for name in named if not hasattr(errors, name)} == {"Cancelled"}


def test_names_in_compose_match_the_configurations():
    scraped = yaml.safe_load(CONFIG.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert scraped == [f"server:{Settings.metrics_port}"]
    assert {"server", "prometheus", "grafana"} == set(COMPOSE["services"])
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    grafana = COMPOSE["services"]["grafana"]
    assert source["url"].removeprefix("$") in grafana["environment"]
    targets = filter(None, (panel.get("datasource") for panel in DASHBOARD["panels"]))
    assert {target["uid"] for target in targets} == {source["uid"]}
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/fewheads.yaml").read_text())["providers"][0]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (GRAFANA / "dashboards" / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]


def expressions():
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    found = [one.replace("$instance", ".*").replace("$model", ".*").replace("$__rate_interval", "1m") for one in found]
    assert not [one for one in found if "$" in one]
    for variable in DASHBOARD["templating"]["list"]:
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
        found.append(f"count by ({label}) ({series.replace('$instance', '.*')})")
    return found


class Prometheus:
    def __init__(self, port):
        self._api = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path, **parameters):
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression):
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]


@contextmanager
def prometheus(directory, targets):
    """Run Prometheus with the shipped configuration and other addresses of servers."""
    program = tool("prometheus", INSTALL)
    config = CONFIG.read_text()
    (address,) = re.findall(r"targets: (\[.+\])", config)
    (directory / CONFIG.name).write_text(config.replace(address, json.dumps(targets)))
    shutil.copy(RULES, directory)
    command = [program, f"--config.file={directory / CONFIG.name}", f"--storage.tsdb.path={directory / 'data'}"]
    log = directory / "log"
    with log.open("w") as output, subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=output) as it:
        try:
            assert wait_until(lambda: "Server is ready" in log.read_text(), SECONDS), log.read_text()
            (port,) = re.findall(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)', log.read_text())
            yield Prometheus(port)
        finally:
            it.terminate()


@contextmanager
def traffic(server):
    """Send requests of every kind while the block runs: for each tier, invalid ones, and some that are too late."""
    done = threading.Event()
    late = parameter("timeout", int64_param=1)  # µs

    def work():
        with Client(f"127.0.0.1:{server.ready.grpc_port}", retries=ONCE) as client:
            while not done.wait(0.1):
                client.infer("calculator-oracle", {"expression": text(["1 + 1"])})
                for tier in ("full", "lean"):
                    client.infer("sentiment", {"text": text(["a good film"])}, tier=tier)
                with suppress(ServerError):
                    client.infer("calculator-oracle", {"expression": text(["1 +"])})
                with suppress(grpc.RpcError):
                    server.stub.ModelInfer(late)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_every_panel_of_the_dashboard_has_data(tmp_path):
    """Two servers; one has the sensors of a board that draws three times its idle power under load."""
    repository = tmp_path / "repository"
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    write_sentiment_bundle(repository / "sentiment")
    board = orin_nano(tmp_path / "board", 6)
    (milliamperes,) = board.glob("sys/devices/**/curr1_input")  # of VDD_IN
    with (
        served(repository) as here,
        served(repository, program=f"tests.support.conditions board {board}") as there,
        prometheus(tmp_path, [f"127.0.0.1:{one.ready.metrics_port}" for one in (here, there)]) as it,
    ):
        assert wait_until(lambda: bool(it.values("fewheads_idle_power_watts")), SECONDS)
        milliamperes.write_text(f"{3 * int(milliamperes.read_text())}\n")
        with traffic(here), traffic(there):
            for expression in expressions():
                assert wait_until(lambda of=expression: any(map(math.isfinite, it.values(of))), SECONDS), expression
        assert it.values("up") == [1, 1]
        assert min(it.values("sum by (model) (fewheads_energy_joules_total)")) > 0
        rules = [rule for group in it.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) == RULES.read_text().count("- alert:")
        assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
        # The only fault of the fixture's board is its throttling.
        assert {rule["name"] for rule in rules if rule["state"] == "firing"} == {"FewheadsThrottled"}
