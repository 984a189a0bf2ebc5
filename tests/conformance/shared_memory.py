"""Cases about shared memory."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.case import CLIENTS_ERROR, Case
from tests.conformance.peer import Action, Peer, call, flat, memory, outcome, slow, steps, values

_SIZE = 64
_NUMBERS = np.arange(_SIZE // 4, dtype=np.float32)


def _register(
    path: Path | str, size: int = _SIZE, offset: int = 0, name: str = "region"
) -> pb.SystemSharedMemoryRegisterRequest:
    key = f"/{path.name}" if isinstance(path, Path) else path
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)


def _with_region(ask: Callable[[Peer, Path], str], size: int = _SIZE, offset: int = 0) -> Callable[[Peer], str]:
    """Run an action with a region of 64 bytes, 0 to 15 as FP32."""

    def run(peer: Peer) -> str:
        with memory(_NUMBERS.tobytes()) as path:
            registered = outcome(lambda: peer.send("SystemSharedMemoryRegister", _register(path, size, offset)))
            if registered != "OK":
                return f"register {registered}"
            try:
                return ask(peer, path)
            finally:
                peer.send("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="region"))

    return run


def _registering(
    size: int = _SIZE, offset: int = 0, name: str = "region", twice: bool = False
) -> Callable[[Peer], str]:
    def run(peer: Peer) -> str:
        with memory(_NUMBERS.tobytes()) as path:
            register = call("SystemSharedMemoryRegister", _register(path, size, offset, name))
            answer = steps(*[register] * (2 if twice else 1))(peer)
            peer.send("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest())
            return answer

    return run


def _point(tensor: Any, size: int, offset: int | None = None, region: str = "region") -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    if offset is not None:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def _input(size: int, offset: int | None = None, region: str = "region", elements: int = 2) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="flat")
    _point(message.inputs.add(name="x", datatype="FP32", shape=[elements]), size, offset, region)
    return message


def _output(size: int, offset: int | None = None, region: str = "region") -> pb.ModelInferRequest:
    message = flat(8.5, 9.5)
    _point(message.outputs.add(name="x_out"), size, offset, region)
    return message


def _infer(message: pb.ModelInferRequest, view: Callable[[Any], object] | None = None) -> Callable[[Peer], str]:
    return _with_region(lambda peer, _: outcome(lambda: peer.send("ModelInfer", message), view))


def _written(message: pb.ModelInferRequest) -> Callable[[Peer], str]:
    """The contents of shared memory after an output, and its parameters in the response."""

    def ask(peer: Peer, path: Path) -> str:
        response = peer.send("ModelInfer", message)
        parameters = response.outputs[0].parameters
        names = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
        entries = [len(entry) for entry in response.raw_output_contents]
        return f"{np.frombuffer(path.read_bytes(), np.float32)[:5].tolist()} {sorted(names.items())} raw {entries}"

    return _with_region(ask)


def _status(peer: Peer, path: Path) -> str:
    def read(response: pb.SystemSharedMemoryStatusResponse) -> str:
        return str([(r.name, r.key == f"/{path.name}", r.offset, r.byte_size) for r in response.regions.values()])

    request = pb.SystemSharedMemoryStatusRequest(name="region")
    return outcome(lambda: peer.send("SystemSharedMemoryStatus", request), read)


def _while_in_use(peer: Peer, path: Path) -> str:
    """Unregister a region while a request has an output for it."""
    message = slow(400)
    _point(message.outputs.add(name="steps_out"), 8)
    flying = peer.infer(message)
    time.sleep(0.03)
    gone = outcome(
        lambda: peer.send("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="region"))
    )
    answer = outcome(flying.result)
    written = struct.unpack_from("<q", path.read_bytes())[0] == 400
    return f"unregister {gone}, the request {answer}, written: {written}"


def _shrunk(peer: Peer, path: Path) -> str:
    path.write_bytes(b"")
    return f"{outcome(lambda: peer.send('ModelInfer', _input(8)))}, then {outcome(lambda: peer.send('ServerLive'))}"


def _typed_too(peer: Peer, path: Path) -> str:
    message = _input(8)
    message.inputs[0].contents.fp32_contents.extend([1.0, 2.0])
    return outcome(lambda: peer.send("ModelInfer", message))


_UNREGISTER = pb.SystemSharedMemoryUnregisterRequest
_LOCATED = "The response contains the region and the size of the output."
_UNALIGNED = "The offset needs no alignment to a page."
INVALID = "INVALID_ARGUMENT"


def _refused(name: str, action: Action, text: str) -> Case:
    return Case(f"shared memory: {name}", action, INVALID, text=text)


def _clients_error(name: str, action: Action, ours: str, text: str) -> Case:
    return Case(f"shared memory: {name}", action, "INTERNAL", ours, CLIENTS_ERROR, text)


def _key(key: str, size: int = _SIZE) -> Action:
    return call("SystemSharedMemoryRegister", _register(key, size))


def _located(offset: str = "") -> str:
    return f"[('shared_memory_byte_size', 8), {offset}('shared_memory_region', 'region')] raw [0]"


CASES = [
    Case("shared memory: register", _registering(), "OK"),
    Case("shared memory: a part of an object", _registering(32, 16), INVALID, "OK", _UNALIGNED),
    Case("shared memory: register twice", _registering(twice=True), "OK, ALREADY_EXISTS", text="a name that is taken"),
    _refused("more than the object has", _registering(_SIZE + 1), "got 65 bytes from 0 on, expected at most the"),
    _refused("offset beyond the object", _registering(8, _SIZE), "got 8 bytes from 64 on"),
    _refused("offset that overflows", _registering(8, 2**64 - 4), f"got 8 bytes from {2**64 - 4} on"),
    _refused("0 bytes", _registering(0), "got 0 bytes, expected 1 or more"),
    Case(
        "shared memory: no name",
        _registering(name=""),
        "OK",
        INVALID,
        "Unregistering without a name unregisters all, so this one could not be unregistered alone.",
        "got '', expected 1 to 255 bytes",
    ),
    _clients_error("no such object", _key("/zz-not-there"), "NOT_FOUND", "zz-not-there"),
    _clients_error("no key", _key(""), INVALID, "got '', expected the name of an object"),
    _clients_error("a key with a path", _key("/../etc/passwd", 8), INVALID, "'/../etc/passwd', expected the name"),
    _clients_error("register, empty message", call("SystemSharedMemoryRegister"), INVALID, "region name: got ''"),
    Case("shared memory: status", _with_region(_status), "OK: [('region', True, 0, 64)]"),
    Case(
        "shared memory: status with an offset",
        _with_region(_status, 32, 16),
        f"register {INVALID}",
        "OK: [('region', True, 16, 32)]",
        _UNALIGNED,
    ),
    Case(
        "shared memory: status, unknown region",
        call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="zz")),
        "NOT_FOUND",
        text="got 'zz', expected one of: none at all",
    ),
    Case(
        "shared memory: unregister an unknown region",
        call("SystemSharedMemoryUnregister", _UNREGISTER(name="zz")),
        "OK",
    ),
    Case("shared memory: unregister all", call("SystemSharedMemoryUnregister", _UNREGISTER()), "OK"),
    Case("shared memory: an input", _infer(_input(8), values), "OK: x_out=[0.0, 1.0]"),
    Case("shared memory: an input with an offset", _infer(_input(8, 16), values), "OK: x_out=[4.0, 5.0]"),
    Case("shared memory: an input of an unknown region", _infer(_input(8, region="zz")), "NOT_FOUND", text="'zz'"),
    _refused("an input beyond the region", _infer(_input(8, _SIZE - 4)), "got 8 bytes from 60 on, expected a part of"),
    _refused(
        "an input larger than the region",
        _infer(_input(_SIZE + 8, elements=_SIZE // 4 + 2)),
        "got 72 bytes from 0 on, expected a part of the 64 bytes of region 'region'",
    ),
    _refused("a negative offset", _infer(_input(8, -8)), "got 8 bytes from -8 on"),
    _refused("an offset that overflows", _infer(_input(8, 2**63 - 4)), f"got 8 bytes from {2**63 - 4} on"),
    _refused("a negative size", _infer(_input(-8)), "got -8 bytes from 0 on"),
    _refused("fewer bytes than the shape says", _infer(_input(4)), "got 4 raw bytes, expected 8 for FP32 [2]"),
    _refused("more bytes than the shape says", _infer(_input(12)), "got 12 raw bytes, expected 8"),
    _refused("typed contents too", _with_region(_typed_too), "shared memory and typed contents"),
    Case(
        "shared memory: an output",
        _written(_output(8)),
        "[8.5, 9.5, 2.0, 3.0, 4.0] [] raw [0]",
        f"[8.5, 9.5, 2.0, 3.0, 4.0] {_located()}",
        _LOCATED,
    ),
    Case(
        "shared memory: an output with an offset",
        _written(_output(8, 8)),
        "[0.0, 1.0, 8.5, 9.5, 4.0] [] raw [0]",
        "[0.0, 1.0, 8.5, 9.5, 4.0] " + _located("('shared_memory_offset', 8), "),
        _LOCATED,
    ),
    Case(
        "shared memory: more room than the output needs",
        _written(_output(16)),
        "[8.5, 9.5, 2.0, 3.0, 4.0] [] raw [0]",
        f"[8.5, 9.5, 2.0, 3.0, 4.0] {_located()}",
        _LOCATED,
    ),
    _clients_error("an output too large", _infer(_output(4)), INVALID, "got 4 bytes, expected at least 8"),
    _refused("an output beyond the region", _infer(_output(8, _SIZE - 4)), "got 8 bytes from 60 on"),
    Case("shared memory: an output of an unknown region", _infer(_output(8, region="zz")), "NOT_FOUND", text="'zz'"),
    Case(
        "shared memory: unregister while an output is on its way",
        _with_region(_while_in_use),
        "unregister INTERNAL, the request OK, written: True",
        "unregister OK, the request OK, written: True",
        "The request keeps its region, and the client need not retry.",
    ),
    Case("CUDA's shared memory: status", call("CudaSharedMemoryStatus", view=lambda r: len(r.regions)), "OK: 0"),
    Case(
        "CUDA's shared memory: register",
        call("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"1", byte_size=8)),
        INVALID,
        "UNIMPLEMENTED",
        "There is none on a Jetson.",
        "CUDA IPC",
    ),
    Case(
        "CUDA's shared memory: unregister",
        call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="a")),
        "OK",
    ),
]
