"""Attacks with the content of requests, by clients with a token."""

import struct
import zlib
from functools import cache

import grpc

from edge.pb import inference_pb2 as pb
from tests.attacks.measure import attack
from tests.attacks.target import WIDE, WIDE_OUTPUTS, Setup, picture_request
from tests.support import image_model
from tests.support.models import ORACLE
from tests.support.sample_requests import good
from tests.support.server_models import busy


def send(target, method, *messages):
    """Send all messages, serialized or not, at once, and return their statuses."""
    contents = [each if isinstance(each, bytes) else each.SerializeToString() for each in messages]
    with target.channel() as channel:
        return [future.code() for future in [target.call(channel, method, each) for each in contents]]


@attack()
def unknown_parameters(target):
    """5.5 MB of names of parameters that resemble known ones, and 16 requests of 4,000 names."""
    send(target, "ModelInfer", _with_parameters(250_000), *[_with_parameters(4_000)] * 16)


@cache
def _with_parameters(count):
    request = good()
    for number in range(count):
        request.parameters[f"timeou{number:06d}"].int64_param = 1
    return request.SerializeToString()


@attack(spares=("infer", "image"), setup=Setup(("--instances=1",)))  # they wait for the same runs
def large_ids_that_wait(target):
    """Requests that wait behind others, with ids of 60 MB and of 4 MB, 600 MB in all."""
    waiting = busy(1)
    contents = []
    for size, count in ((60_000_000, 4), (4_000_000, 90)):
        waiting.id = "i" * size
        contents += [waiting.SerializeToString()] * count
    with target.channel() as first, target.channel() as second:
        ahead = [target.call(first, "ModelInfer", busy(2_000).SerializeToString()) for _ in range(2)]
        for future in [target.call(second, "ModelInfer", content) for content in contents]:
            future.code()
        for future in ahead:
            future.cancel()


@attack()
def hostile_pictures(target):
    """PNGs of 15,000 compressed colour profiles of 1 MB, of 1.4 million empty chunks, and of 65,535 broken tags."""
    entries = b"".join(struct.pack("<HHII", number, 2, 1 << 20, 1 << 20) for number in range(65_535))
    chunks = (
        image_model.png_chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(1_000_000))) * 15_000,
        image_model.png_chunk(b"aaAa", b"") * 1_400_000,
        image_model.png_chunk(b"eXIf", b"II*\0\x08\0\0\0" + struct.pack("<H", 65_535) + entries),
    )
    plain = image_model.encoded(image_model.bright(200, 10))
    send(target, "ModelInfer", *(picture_request(plain[:33] + each + plain[33:]) for each in chunks))  # behind its head


@attack()
def long_names(target):
    """Models and heads with names of 60 MB, and of 3 MB, which more methods take: each gets a status about its name."""
    statuses = []
    for name in ("n" * 60_000_000, "n" * 3_000_000):
        model, head = good(), good()
        model.model_name = head.parameters["head"].string_param = name
        statuses += send(target, "ModelReady", pb.ModelReadyRequest(name=name))
        statuses += send(target, "ModelInfer", model, head)
    expected = {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}
    lost = sorted(status.name for status in set(statuses) - expected - {grpc.StatusCode.RESOURCE_EXHAUSTED})
    return f"status {', '.join(lost)}" if lost else None


@attack(spares=("image",))  # their decoding waits for the same threads
def long_texts(target):
    """16 requests of 32 texts of 16 KB each, to tokenize."""
    request = pb.ModelInferRequest(model_name="sentiment")
    data = [b"good bad " * 1_800] * 32
    request.inputs.add(name="text", datatype="BYTES", shape=(32, 1)).contents.bytes_contents.extend(data)
    send(target, "ModelInfer", *[request] * 16)


@attack()
def texts_that_are_too_many(target):
    """Four requests of 15 million empty texts, in 60 MB."""
    request = pb.ModelInferRequest(model_name="sentiment")
    request.inputs.add(name="text", datatype="BYTES", shape=(15_000_000, 1))
    request.raw_input_contents.append(bytes(60_000_000))
    send(target, "ModelInfer", *[request] * 4)


@attack()
def messages_of_many_parts(target):
    """Millions of inputs, outputs and raw contents, and of dimensions, numbers and texts of an input."""
    count = 9_000_000
    for tag in b"\x2a\x32\x3a":  # of an empty input, output and entry of raw contents
        send(target, "ModelInfer", bytes((tag, 0)) * count)
    for fields in (
        {"shape": b"\1" * count},
        {"contents": {"int64_contents": bytes(count)}},
        {"contents": {"bytes_contents": [b""] * count}},
    ):
        send(target, "ModelInfer", pb.ModelInferRequest(model_name=ORACLE, inputs=[{"name": "x", **fields}]))


@attack()
def many_ranks(target):
    """Three outputs of a million numbers, of which the likeliest 262,144 each are wanted, with their ranks."""
    request = pb.ModelInferRequest(model_name=WIDE)
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    for name in WIDE_OUTPUTS:
        request.outputs.add(name=name).parameters["classification"].int64_param = 2**18
    (status,) = send(target, "ModelInfer", request)
    return None if status is grpc.StatusCode.OK else f"status {status.name}"
