"""Requests to the model that computes for as many steps as they say, and the failures that it counts."""

from __future__ import annotations

import numpy as np

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc


def busy(steps: int, timeout_us: int = 0) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="busy")
    request.inputs.add(name="steps", datatype="INT64", shape=[1])
    request.raw_input_contents.append(np.int64(steps).tobytes())
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    return request


def failures(stub: Stub) -> int:
    count: int = stub.ModelStatistics(pb.ModelStatisticsRequest(name="busy")).model_stats[0].inference_stats.fail.count
    return count


Stub = inference_pb2_grpc.GRPCInferenceServiceStub

QUEUE_SIZE = 32
