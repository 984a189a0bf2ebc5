"""Random inference requests, mutations of messages, and the settings of the fuzzers."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from edge.pb import inference_pb2 as pb
from tests.support.models import ORACLE, VERSIONED


def profile(examples):
    fixed = {"deadline": None, "database": None, "derandomize": True, "phases": [Phase.generate, Phase.shrink]}
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck), **fixed)


integers = st.integers(-2, 16) | st.sampled_from([0, 15, 64, 65, 2**31, 2**62, 2**63 - 1, -(2**63)])
integers |= st.integers(-(2**63), 2**63 - 1)
names = st.one_of(st.sampled_from(["x", "expression", "value", "in_int8", "steps", ""]), st.text(max_size=8))
datatypes = st.one_of(st.sampled_from(["FP32", "BYTES", "INT8", "FP16", "BF16", "BOOL", ""]), st.text(max_size=6))

_known = ["timeout", "priority", "timings", "sequence_id", "triton_x", "shared_memory_region", "classification"]
parameters = st.dictionaries(
    st.one_of(st.sampled_from(_known), st.text(max_size=6)),
    st.one_of(
        st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, string_param=st.text(max_size=8)),
        st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
        st.builds(pb.InferParameter, double_param=st.floats()),
        st.just(pb.InferParameter()),
    ),
    max_size=2,
)

contents = st.builds(
    pb.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=3),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    fp32_contents=st.lists(st.floats(width=32), max_size=3) | st.lists(st.floats(width=32), min_size=15, max_size=15),
    bytes_contents=st.lists(st.binary(max_size=8), max_size=3),
)

inputs = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=names,
    datatype=datatypes,
    shape=st.lists(integers, max_size=4),
    parameters=parameters,
    contents=st.one_of(st.none(), contents),
)

_models = [ORACLE, VERSIONED, "echo-int8", "echo-bytes", "broken", ""]
_outputs = st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=names, parameters=parameters)
requests = st.builds(
    pb.ModelInferRequest,
    model_name=st.one_of(st.sampled_from(_models), st.text(max_size=8)),
    model_version=st.one_of(st.sampled_from(["", "1", "3", "0", "-1", "abc"]), st.text(max_size=4)),
    id=st.text(max_size=8),
    parameters=parameters,
    inputs=st.lists(inputs, max_size=3),
    outputs=st.lists(_outputs, max_size=2),
    raw_input_contents=st.lists(st.one_of(st.binary(max_size=64), st.binary(min_size=60, max_size=60)), max_size=3),
)


@st.composite
def mutated(draw, seeds):
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["change", "remove", "insert", "cut"]))
        if kind == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "cut":
            del data[at:]
    return bytes(data)
