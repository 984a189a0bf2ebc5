"""A server without further options rejects dangerous requests, and THREATS.md names only options that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

import edge
from edge.cli.serve import serve
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import LOAD, REGION, log_setting, trace_setting

ROOT = Path(edge.__file__).parent.parent
PAGE = (ROOT / "deploy" / "THREATS.md").read_text()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with (
        running_server([ORACLE_BUNDLE], cache=tmp_path_factory.mktemp("cache")) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("RepositoryModelLoad", LOAD, "--model-control explicit"),
        ("SystemSharedMemoryRegister", REGION, "--allow-shared-memory"),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "--allow-shared-memory"),
        ("LogSettings", log_setting("log_info", bool_param=False), "--allow-log-settings"),
        ("TraceSetting", trace_setting("trace_level", "TIMESTAMPS"), "as the server was started"),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a"), "no CUDA IPC"),
    ],
)
def test_dangerous_requests_are_unimplemented(stub: Any, method: str, request_: Any, message: str) -> None:
    with pytest.raises(grpc.RpcError, match=message) as caught:
        getattr(stub, method)(request_, timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_settings_are_readable(stub: Any) -> None:
    assert stub.LogSettings(pb.LogSettingsRequest(), timeout=10).settings["log_info"].bool_param
    assert stub.TraceSetting(pb.TraceSettingRequest(), timeout=10).settings["trace_level"].value == ["OFF"]


def test_options_of_the_page_exist() -> None:
    options = {option for parameter in serve.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= options
