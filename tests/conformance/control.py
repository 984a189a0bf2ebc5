"""Cases about loading and unloading models."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.case import CLIENTS_ERROR, NO_TYPING_ERROR, Case
from tests.conformance.metadata import config, metadata, ready
from tests.conformance.peer import Action, Peer, call, flat, infer, outcome, request, slow, steps


def _change(verb: str, name: str, repository: str, parameters: dict[str, Any]) -> Action:
    kind = {"Load": pb.RepositoryModelLoadRequest, "Unload": pb.RepositoryModelUnloadRequest}[verb]
    message = kind(model_name=name, repository_name=repository)
    for key, value in parameters.items():
        message.parameters[key].MergeFrom(pb.ModelRepositoryParameter(**value))
    return call(f"RepositoryModel{verb}", message)


def _load(name: str, repository: str = "", **parameters: Any) -> Action:
    return _change("Load", name, repository, parameters)


def _unload(name: str, **parameters: Any) -> Action:
    return _change("Unload", name, "", parameters)


def _wait(name: str, state: str) -> Action:
    """Wait until all versions of a model have a state; Triton returns OK before that."""

    def wait(peer: Peer) -> str:
        for _ in range(1000):
            models = peer.send("RepositoryIndex", pb.RepositoryIndexRequest()).models
            if {model.state for model in models if model.name == name} == {state}:
                return state
            time.sleep(0.02)
        return "never"

    return wait


def _gone(name: str) -> Action:
    return steps(_unload(name), _wait(name, "UNAVAILABLE"))


def _back(name: str) -> Action:
    return steps(_load(name), _wait(name, "READY"))


def _while_gone(name: str, action: Action) -> Action:
    """Run an action while a model is unloaded."""

    def run(peer: Peer) -> str:
        _gone(name)(peer)
        try:
            return action(peer)
        finally:
            _back(name)(peer)

    return run


def _state(name: str) -> Action:
    def states(response: pb.RepositoryIndexResponse) -> str:
        return " ".join(f"{m.version}={m.state} {m.reason}" for m in response.models if m.name == name)

    return call("RepositoryIndex", pb.RepositoryIndexRequest(), states)


def _answered_while_unloading(peer: Peer) -> str:
    """A request in progress when its model is unloaded."""
    flying = peer.infer(slow(400))
    time.sleep(0.03)
    gone = _unload("slow")(peer)
    answer = outcome(flying.result)
    steps(_wait("slow", "UNAVAILABLE"), _back("slow"))(peer)
    return f"unload {gone}, the request {answer}"


def _statistics_after_reload(peer: Peer) -> str:
    peer.send("ModelInfer", flat(model="versioned"))
    steps(_gone("versioned"), _back("versioned"))(peer)
    return f"runs counted before: {peer.executions('versioned', '3') > 0}"


_X = np.ones(1, np.float32)
_AS_CHECKED = "No parameter changes what is served: a bundle is served as it was checked."
CASES = [
    Case("load what is loaded", steps(_load("flat"), infer(flat())), "OK, OK"),
    Case("load an unknown model", _load("zz"), "INTERNAL", "NOT_FOUND", CLIENTS_ERROR, "'zz'"),
    Case("load no name", _load(""), "INTERNAL", "NOT_FOUND", CLIENTS_ERROR),
    Case(
        "load a broken model",
        _load("broken"),
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "The request is right, the bundle is not.",
        "model.onnx",
    ),
    Case("load from another repository", _load("flat", repository="zz"), "UNIMPLEMENTED", text="one repository"),
    *(
        Case(f"load with {what}", _load("flat", **{key: value}), triton, "UNIMPLEMENTED", _AS_CHECKED, f"'{key}'")
        for what, key, value, triton in (
            ("an unknown parameter", "zz", {"string_param": "1"}, "INVALID_ARGUMENT"),
            ("a configuration that is none", "config", {"string_param": "zz"}, "INTERNAL"),
            ("a configuration of the wrong type", "config", {"bool_param": True}, "INVALID_ARGUMENT"),
        )
    ),
    Case("unload an unknown model", _unload("zz"), "OK"),
    Case(
        "unload with unload_dependents",
        steps(
            _unload("versioned", unload_dependents={"bool_param": True}),
            _wait("versioned", "UNAVAILABLE"),
            _back("versioned"),
        ),
        "OK, UNAVAILABLE, OK, READY",
    ),
    Case(
        "unload with unload_dependents as text",
        _unload("zz", unload_dependents={"string_param": "1"}),
        "INVALID_ARGUMENT",
        text="got string_param, expected bool_param",
    ),
    Case(
        "unload with an unknown parameter",
        _unload("zz", zz={"string_param": "1"}),
        "OK",
        "UNIMPLEMENTED",
        NO_TYPING_ERROR,
        "'zz', expected unload_dependents",
    ),
    Case("unloaded: ModelReady", _while_gone("versioned", ready("versioned")), "OK: False"),
    Case("unloaded: ModelInfer", _while_gone("versioned", infer(request("versioned", x=_X))), "NOT_FOUND"),
    Case(
        "unloaded: ModelInfer of a version",
        _while_gone("versioned", infer(request("versioned", version="1", x=_X))),
        "UNAVAILABLE",
        "NOT_FOUND",
        "The same with a version and without; UNAVAILABLE would invite a retry.",
    ),
    Case("unloaded: ModelMetadata", _while_gone("versioned", metadata("versioned")), "NOT_FOUND"),
    Case("unloaded: ModelConfig", _while_gone("versioned", config("versioned")), "NOT_FOUND"),
    Case(
        "unloaded: ModelStatistics",
        _while_gone("versioned", call("ModelStatistics", pb.ModelStatisticsRequest(name="versioned"))),
        "INVALID_ARGUMENT",
        "OK",
        "Statistics outlive reloads.",
    ),
    Case("unloaded: RepositoryIndex", _while_gone("flat", _state("flat")), "OK: 1=UNAVAILABLE unloaded"),
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
