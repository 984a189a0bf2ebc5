"""Cases about loading and unloading models."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.case import Case
from tests.conformance.peer import Ask, Peer, call, flat, infer, request, slow, steps, told


def _load(name: str, repository: str = "", **parameters: Any) -> Ask:
    message = pb.RepositoryModelLoadRequest(model_name=name, repository_name=repository)
    for key, value in parameters.items():
        message.parameters[key].MergeFrom(pb.ModelRepositoryParameter(**value))
    return call("RepositoryModelLoad", message)


def _unload(name: str, repository: str = "", **parameters: Any) -> Ask:
    message = pb.RepositoryModelUnloadRequest(model_name=name, repository_name=repository)
    for key, value in parameters.items():
        message.parameters[key].MergeFrom(pb.ModelRepositoryParameter(**value))
    return call("RepositoryModelUnload", message)


def _wait(name: str, state: str) -> Ask:
    """Wait until all versions of a model are in a state, for Triton says OK before they are."""

    def ask(peer: Peer) -> str:
        for _ in range(1000):
            models = peer.send("RepositoryIndex", pb.RepositoryIndexRequest()).models
            if {model.state for model in models if model.name == name} == {state}:
                return state
            time.sleep(0.02)
        return "never"

    return ask


def _while_gone(name: str, ask: Ask) -> Ask:
    """Ask while a model is unloaded."""

    def run(peer: Peer) -> str:
        steps(_unload(name), _wait(name, "UNAVAILABLE"))(peer)
        try:
            return ask(peer)
        finally:
            steps(_load(name), _wait(name, "READY"))(peer)

    return run


def _index(name: str) -> Ask:
    def states(response: pb.RepositoryIndexResponse) -> str:
        return " ".join(f"{m.version}={m.state} {m.reason}" for m in response.models if m.name == name)

    return call("RepositoryIndex", pb.RepositoryIndexRequest(), states)


def _answered_while_unloading(peer: Peer) -> str:
    """A request on its way when its model is unloaded."""
    flying = peer.infer(slow(400))
    time.sleep(0.03)
    gone = _unload("slow")(peer)
    answer = told(flying.result)
    steps(_wait("slow", "UNAVAILABLE"), _load("slow"), _wait("slow", "READY"))(peer)
    return f"unload {gone}, the request {answer}"


def _statistics_after_reload(peer: Peer) -> str:
    peer.send("ModelInfer", flat(model="versioned"))
    steps(_unload("versioned"), _wait("versioned", "UNAVAILABLE"), _load("versioned"), _wait("versioned", "READY"))(
        peer
    )
    return f"runs counted before: {peer.executions('versioned', '3') > 0}"


_X = np.ones(1, np.float32)
CASES = [
    Case("load what is loaded", steps(_load("flat"), infer(flat())), "OK, OK"),
    Case("load an unknown model", _load("zz"), "INTERNAL", "NOT_FOUND", "It is the client's error."),
    Case("load no name", _load(""), "INTERNAL", "NOT_FOUND", "It is the client's error."),
    Case(
        "load a broken model",
        _load("broken"),
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "The request is right, the bundle is not.",
    ),
    Case("load from another repository", _load("flat", repository="zz"), "UNIMPLEMENTED"),
    Case(
        "load with an unknown parameter",
        _load("flat", zz={"string_param": "1"}),
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "No parameter changes what is served: a bundle is served as it was checked.",
    ),
    Case(
        "load with a configuration that is none",
        _load("flat", config={"string_param": "zz"}),
        "INTERNAL",
        "UNIMPLEMENTED",
        "No parameter changes what is served: a bundle is served as it was checked.",
    ),
    Case(
        "load with a configuration of the wrong type",
        _load("flat", config={"bool_param": True}),
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "No parameter changes what is served: a bundle is served as it was checked.",
    ),
    Case("unload an unknown model", _unload("zz"), "OK"),
    Case(
        "unload with unload_dependents",
        steps(
            _unload("versioned", unload_dependents={"bool_param": True}),
            _wait("versioned", "UNAVAILABLE"),
            _load("versioned"),
            _wait("versioned", "READY"),
        ),
        "OK, UNAVAILABLE, OK, READY",
    ),
    Case(
        "unload with unload_dependents as text",
        _unload("zz", unload_dependents={"string_param": "1"}),
        "INVALID_ARGUMENT",
    ),
    Case(
        "unload with an unknown parameter",
        _unload("zz", zz={"string_param": "1"}),
        "OK",
        "UNIMPLEMENTED",
        "A typing error should not pass for a success.",
    ),
    Case(
        "unloaded: ModelReady",
        _while_gone("versioned", call("ModelReady", pb.ModelReadyRequest(name="versioned"), lambda r: r.ready)),
        "OK: False",
    ),
    Case("unloaded: ModelInfer", _while_gone("versioned", infer(request("versioned", x=_X))), "NOT_FOUND"),
    Case(
        "unloaded: ModelInfer of a version",
        _while_gone("versioned", infer(request("versioned", version="1", x=_X))),
        "UNAVAILABLE",
        "NOT_FOUND",
        "The same with a version and without; UNAVAILABLE would ask for another attempt.",
    ),
    Case(
        "unloaded: ModelMetadata",
        _while_gone("versioned", call("ModelMetadata", pb.ModelMetadataRequest(name="versioned"))),
        "NOT_FOUND",
    ),
    Case(
        "unloaded: ModelConfig",
        _while_gone("versioned", call("ModelConfig", pb.ModelConfigRequest(name="versioned"))),
        "NOT_FOUND",
    ),
    Case(
        "unloaded: ModelStatistics",
        _while_gone("versioned", call("ModelStatistics", pb.ModelStatisticsRequest(name="versioned"))),
        "INVALID_ARGUMENT",
        "OK",
        "Statistics outlive reloads.",
    ),
    Case("unloaded: RepositoryIndex", _while_gone("flat", _index("flat")), "OK: 1=UNAVAILABLE unloaded"),
    Case("unloaded: others go on", _while_gone("versioned", infer(flat())), "OK"),
    Case("unload with a request on its way", _answered_while_unloading, "unload OK, the request OK"),
    Case(
        "statistics after a reload",
        _statistics_after_reload,
        "runs counted before: False",
        "runs counted before: True",
        "Statistics outlive reloads.",
    ),
]
