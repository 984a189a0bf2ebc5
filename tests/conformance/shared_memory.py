"""Cases about shared memory."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge.pb import inference_pb2 as pb
from tests.conformance.case import Case
from tests.conformance.peer import Peer, call, flat, memory, slow, steps, told, values

_SIZE = 64
_NUMBERS = np.arange(_SIZE // 4, dtype=np.float32)


def _register(
    path: Path | str, size: int = _SIZE, offset: int = 0, name: str = "region"
) -> pb.SystemSharedMemoryRegisterRequest:
    key = f"/{path.name}" if isinstance(path, Path) else path
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)


def _with_region(ask: Callable[[Peer, Path], str], size: int = _SIZE, offset: int = 0) -> Callable[[Peer], str]:
    """Ask while there is a region of 64 bytes that hold 0 to 15 as FP32."""

    def run(peer: Peer) -> str:
        with memory(_NUMBERS.tobytes()) as path:
            registered = told(lambda: peer.send("SystemSharedMemoryRegister", _register(path, size, offset)))
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
    return _with_region(lambda peer, _: told(lambda: peer.send("ModelInfer", message), view))


def _written(message: pb.ModelInferRequest) -> Callable[[Peer], str]:
    """What an output in shared memory leaves there, and what the response says of it."""

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
    return told(lambda: peer.send("SystemSharedMemoryStatus", request), read)


def _while_in_use(peer: Peer, path: Path) -> str:
    """Unregister a region that an output on its way shall go to."""
    message = slow(400)
    _point(message.outputs.add(name="steps_out"), 8)
    flying = peer.infer(message)
    time.sleep(0.03)
    gone = told(
        lambda: peer.send("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="region"))
    )
    answer = told(flying.result)
    written = struct.unpack_from("<q", path.read_bytes())[0] == 400
    return f"unregister {gone}, the request {answer}, written: {written}"


def _shrunk(peer: Peer, path: Path) -> str:
    path.write_bytes(b"")
    return f"{told(lambda: peer.send('ModelInfer', _input(8)))}, then {told(lambda: peer.send('ServerLive'))}"


def _typed_too(peer: Peer, path: Path) -> str:
    message = _input(8)
    message.inputs[0].contents.fp32_contents.extend([1.0, 2.0])
    return told(lambda: peer.send("ModelInfer", message))


_UNREGISTER = pb.SystemSharedMemoryUnregisterRequest
CASES = [
    Case("shared memory: register", _registering(), "OK"),
    Case(
        "shared memory: a part of an object",
        _registering(32, 16),
        "INVALID_ARGUMENT",
        "OK",
        "The offset need not be that of a page.",
    ),
    Case("shared memory: register twice", _registering(twice=True), "OK, ALREADY_EXISTS"),
    Case("shared memory: more than the object has", _registering(_SIZE + 1), "INVALID_ARGUMENT"),
    Case("shared memory: offset beyond the object", _registering(8, _SIZE), "INVALID_ARGUMENT"),
    Case("shared memory: offset that overflows", _registering(8, 2**64 - 4), "INVALID_ARGUMENT"),
    Case("shared memory: 0 bytes", _registering(0), "INVALID_ARGUMENT"),
    Case(
        "shared memory: no name",
        _registering(name=""),
        "OK",
        "INVALID_ARGUMENT",
        "Unregistering no name unregisters all, so nothing could end this one alone.",
    ),
    Case(
        "shared memory: no such object",
        call("SystemSharedMemoryRegister", _register("/zz-not-there")),
        "INTERNAL",
        "NOT_FOUND",
        "It is the client's error.",
    ),
    Case(
        "shared memory: no key",
        call("SystemSharedMemoryRegister", _register("")),
        "INTERNAL",
        "INVALID_ARGUMENT",
        "It is the client's error.",
    ),
    Case(
        "shared memory: a key with a path",
        call("SystemSharedMemoryRegister", _register("/../etc/passwd", 8)),
        "INTERNAL",
        "INVALID_ARGUMENT",
        "It is the client's error.",
    ),
    Case(
        "shared memory: register, empty message",
        call("SystemSharedMemoryRegister"),
        "INTERNAL",
        "INVALID_ARGUMENT",
        "It is the client's error.",
    ),
    Case("shared memory: status", _with_region(_status), "OK: [('region', True, 0, 64)]"),
    Case(
        "shared memory: status with an offset",
        _with_region(_status, 32, 16),
        "register INVALID_ARGUMENT",
        "OK: [('region', True, 16, 32)]",
        "The offset need not be that of a page.",
    ),
    Case(
        "shared memory: status, unknown region",
        call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="zz")),
        "NOT_FOUND",
    ),
    Case(
        "shared memory: unregister an unknown region",
        call("SystemSharedMemoryUnregister", _UNREGISTER(name="zz")),
        "OK",
    ),
    Case("shared memory: unregister all", call("SystemSharedMemoryUnregister", _UNREGISTER()), "OK"),
    Case("shared memory: an input", _infer(_input(8), values), "OK: x_out=[0.0, 1.0]"),
    Case("shared memory: an input with an offset", _infer(_input(8, 16), values), "OK: x_out=[4.0, 5.0]"),
    Case("shared memory: an input of an unknown region", _infer(_input(8, region="zz")), "NOT_FOUND"),
    Case("shared memory: an input beyond the region", _infer(_input(8, _SIZE - 4)), "INVALID_ARGUMENT"),
    Case(
        "shared memory: an input larger than the region",
        _infer(_input(_SIZE + 8, elements=_SIZE // 4 + 2)),
        "INVALID_ARGUMENT",
    ),
    Case("shared memory: a negative offset", _infer(_input(8, -8)), "INVALID_ARGUMENT"),
    Case("shared memory: an offset that overflows", _infer(_input(8, 2**63 - 4)), "INVALID_ARGUMENT"),
    Case("shared memory: a negative size", _infer(_input(-8)), "INVALID_ARGUMENT"),
    Case("shared memory: fewer bytes than the shape says", _infer(_input(4)), "INVALID_ARGUMENT"),
    Case("shared memory: more bytes than the shape says", _infer(_input(12)), "INVALID_ARGUMENT"),
    Case("shared memory: typed contents too", _with_region(_typed_too), "INVALID_ARGUMENT"),
    Case(
        "shared memory: an output",
        _written(_output(8)),
        "[8.5, 9.5, 2.0, 3.0, 4.0] [] raw [0]",
        "[8.5, 9.5, 2.0, 3.0, 4.0] [('shared_memory_byte_size', 8), ('shared_memory_region', 'region')] raw [0]",
        "The response tells where the output is, and how large.",
    ),
    Case(
        "shared memory: an output with an offset",
        _written(_output(8, 8)),
        "[0.0, 1.0, 8.5, 9.5, 4.0] [] raw [0]",
        "[0.0, 1.0, 8.5, 9.5, 4.0] [('shared_memory_byte_size', 8), ('shared_memory_offset', 8), "
        "('shared_memory_region', 'region')] raw [0]",
        "The response tells where the output is, and how large.",
    ),
    Case(
        "shared memory: more room than the output needs",
        _written(_output(16)),
        "[8.5, 9.5, 2.0, 3.0, 4.0] [] raw [0]",
        "[8.5, 9.5, 2.0, 3.0, 4.0] [('shared_memory_byte_size', 8), ('shared_memory_region', 'region')] raw [0]",
        "The response tells where the output is, and how large.",
    ),
    Case(
        "shared memory: an output too large",
        _infer(_output(4)),
        "INTERNAL",
        "INVALID_ARGUMENT",
        "It is the client's error.",
    ),
    Case("shared memory: an output beyond the region", _infer(_output(8, _SIZE - 4)), "INVALID_ARGUMENT"),
    Case("shared memory: an output of an unknown region", _infer(_output(8, region="zz")), "NOT_FOUND"),
    Case(
        "shared memory: unregister while an output is on its way",
        _with_region(_while_in_use),
        "unregister INTERNAL, the request OK, written: True",
        "unregister OK, the request OK, written: True",
        "The request keeps what it holds, and the client need not ask again.",
    ),
    Case("CUDA's shared memory: status", call("CudaSharedMemoryStatus", view=lambda r: len(r.regions)), "OK: 0"),
    Case(
        "CUDA's shared memory: register",
        call("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"1", byte_size=8)),
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "There is none on a Jetson.",
    ),
    Case(
        "CUDA's shared memory: unregister",
        call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="a")),
        "OK",
    ),
]
