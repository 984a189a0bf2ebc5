"""Cases about loading and unloading models."""

import time
from functools import partial

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.metadata import metadata, ready, statistics
from tests.conformance.peer import Case, call, flat, infer, outcome, slow, steps
from tests.support.sample_requests import raw_request


def _control(what, name, repository="", **parameters):
    given = {name: pb.ModelRepositoryParameter(**value) for name, value in parameters.items()}
    return call(f"RepositoryModel{what}", model_name=name, repository_name=repository, parameters=given)


_load, _unload = partial(_control, "Load"), partial(_control, "Unload")


def _wait(name, state):
    """Wait until all versions of a model have a state; Triton returns OK before that."""

    def wait(peer):
        for _ in range(1000):
            models = peer.send("RepositoryIndex", pb.RepositoryIndexRequest()).models
            if {model.state for model in models if model.name == name} == {state}:
                return state
            time.sleep(0.02)
        return "never"

    return wait


def _gone(name):
    return steps(_unload(name), _wait(name, "UNAVAILABLE"))


def _back(name):
    return steps(_load(name), _wait(name, "READY"))


def _while_gone(what, action, expected="", name="versioned"):
    def run(peer):
        _gone(name)(peer)
        try:
            return action(peer)
        finally:
            _back(name)(peer)

    return Case(f"unloaded: {what}", run, expected)


def _state(name):
    def states(response):
        return " ".join(f"{m.version}={m.state} {m.reason}" for m in response.models if m.name == name)

    return call("RepositoryIndex", view=states)


def _answered_while_unloading(peer):
    flying = peer.infer(slow(400))
    time.sleep(0.03)
    gone = _unload("slow")(peer)
    answer = outcome(flying.result)
    steps(_wait("slow", "UNAVAILABLE"), _back("slow"))(peer)
    return f"unload {gone}, the request {answer}"


def _statistics_after_reload(peer):
    peer.send("ModelInfer", flat(model="versioned"))
    steps(_gone("versioned"), _back("versioned"))(peer)
    return f"runs counted before: {peer.executions('versioned', '3') > 0}"


_TEXT = {"string_param": "1"}
_CASCADED = steps(
    _unload("versioned", unload_dependents={"bool_param": True}), _wait("versioned", "UNAVAILABLE"), _back("versioned")
)
_KINDS = "got string_param, expected bool_param"
CASES = [
    Case("load what is loaded", steps(_load("flat"), infer(flat())), "OK, OK"),
    Case("load an unknown model", _load("zz"), text="'zz'"),
    Case("load no name", _load("")),
    Case("load a broken model", _load("broken"), text="model.onnx"),
    Case("load from another repository", _load("flat", repository="zz"), "UNIMPLEMENTED", "one repository"),
    Case("load with an unknown parameter", _load("flat", zz=_TEXT), text="'zz'"),
    Case("load with a configuration that is none", _load("flat", config={"string_param": "zz"}), text="'config'"),
    Case("load with a configuration of the wrong type", _load("flat", config={"bool_param": True}), text="'config'"),
    Case("unload an unknown model", _unload("zz"), "OK"),
    Case("unload with unload_dependents", _CASCADED, "OK, UNAVAILABLE, OK, READY"),
    Case("unload with unload_dependents as text", _unload("zz", unload_dependents=_TEXT), "INVALID_ARGUMENT", _KINDS),
    Case("unload with an unknown parameter", _unload("zz", zz=_TEXT), text="'zz', expected unload_dependents"),
    _while_gone("ModelReady", ready("versioned"), "OK: False"),
    _while_gone("ModelInfer", infer(flat(model="versioned")), "NOT_FOUND"),
    _while_gone("ModelInfer of a version", infer(raw_request("versioned", version="1", x=np.ones(1, np.float32)))),
    _while_gone("ModelMetadata", metadata("versioned"), "NOT_FOUND"),
    _while_gone("ModelStatistics", statistics("versioned")),
    _while_gone("RepositoryIndex", _state("flat"), "OK: 1=UNAVAILABLE unloaded", "flat"),
    _while_gone("others go on", infer(flat()), "OK"),
    Case("unload with a request on its way", _answered_while_unloading, "unload OK, the request OK"),
    Case("statistics after a reload", _statistics_after_reload),
]
