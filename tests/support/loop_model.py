"""A loop with known results: each step goes half of the way to the prompt's last value, and leaves 2 ** -loops."""

from contextlib import contextmanager

import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.bundles.programs import LoopProgram
from edge.datatypes import TensorSpec
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import Joining, LoopLimits, Options
from edge.protocol import BY_BUDGET, BY_TOLERANCE, STOPPED
from edge.runtimes.build import load_runner
from tests.support.models import graph_of, manifest_of, serialized
from tests.support.sample_requests import raw_request, with_parameters

NAME = "halving"
MAX_BATCH_SIZE, TOKENS = 4, 5
MAX_LOOPS, MOST_LOOPS, TOLERANCE = 20, 1_000_000, 0.1
#: Last values of a prompt: from the first on it never settles, and from the second on the step fails.
ENDLESS, FAILING = 3.0, 6.0

EXACT = Tolerance(atol=0, rtol=0)
STATES = tuple(TensorSpec(name, "FP32", (-1, -1, 1)) for name in ("prompt", "state"))
NUMBERS = tuple(TensorSpec(name, "FP32", (-1, 1)) for name in ("prediction", "residual"))
XS = (TensorSpec("xs", "FP32", (-1, -1, 1)),)
SEQUENCE = Profile(min=(1, 1, 1), opt=(2, TOKENS, 1), max=(MAX_BATCH_SIZE, TOKENS, 1))

EMBED = """embed (float[N, T, 1] xs) => (float[N, T, 1] prompt, float[N, T, 1] state) {
    prompt = Identity(xs)
    state = Sub(xs, xs)
}"""
#: The same with the values of a prompt, which it ignores.
EMBED_VALUES = EMBED.replace("(float[N, T, 1] xs)", "(float[N, T, 1] xs, float[N, K] ys)")
STEP = """step (float[N, T, 1] state, float[N, T, 1] prompt, int64[N, 1] last)
    => (float[N, T, 1] next_state, float[N, 1] prediction, float[N, 1] residual) {
    sum = Add(state, prompt)  next_state = Mul(sum, half)
    index = Unsqueeze(last, two)  last_state = GatherElements<axis = 1>(next_state, index)
    prediction = Squeeze(last_state, two)
    last_prompt = GatherElements<axis = 1>(prompt, index)  goal = Squeeze(last_prompt, two)
    left = Sub(goal, prediction)  share = Div(left, goal)
    place = Cast<to = 7>(goal)  endless = Gather(table, place)  residual = Add(share, endless)
}"""


def prompt(*values, tokens=3):
    """Return prompts [rows, tokens, 1] that end with the values."""
    xs = np.full((len(values), tokens, 1), 9, np.float32)
    xs[:, -1, 0] = values
    return xs


def write_halving_bundle(directory, golden_loops=MAX_LOOPS, *, values=False, **changes):
    """Write the bundle, with ``values`` one of prompts with values; ``changes`` are fields of its program."""
    xs = prompt(1, 2)
    inputs, profile_of_inputs, embed, given = XS, {"xs": SEQUENCE}, EMBED, {"xs": xs}
    if values:
        inputs, embed = (*XS, TensorSpec("ys", "FP32", (-1, -1))), EMBED_VALUES
        profile_of_inputs["ys"] = Profile(min=(1, 1), opt=(2, TOKENS), max=(MAX_BATCH_SIZE, TOKENS))
        given["ys"] = xs[:, 1:, 0]
        changes |= {"points": "xs", "values": "ys"}
    table = np.array([0, 0, 0, 1, 1, 1], np.float32)
    files = {
        "embed.onnx": serialized(graph_of(embed)),
        "step.onnx": serialized(graph_of(STEP, half=np.float32(0.5), two=np.array([2]), table=table)),
    }
    first = {"prompt": xs, "state": np.zeros_like(xs)}
    half = xs[:, -1] / 2
    steps = {**first, "last": np.array([[2], [2]])}
    halved = {"next_state": xs / 2, "prediction": half, "residual": np.full((2, 1), 0.5, np.float32)}
    share = np.float32(2.0**-golden_loops)
    whole = {"prediction": xs[:, -1] * (1 - share), "residual": np.full((2, 1), share)}
    whole["loops"] = np.full((2, 1), MAX_LOOPS, np.int32)
    files["embed.golden.npz"] = Golden(given, first).encode()
    files["step.golden.npz"] = Golden(steps, halved).encode()
    files["golden.npz"] = Golden(given, whole).encode()
    last = TensorSpec("last", "INT64", (-1, 1))
    profile = {**{spec.name: SEQUENCE for spec in STATES}, "last": Profile(min=(1, 1), opt=(2, 1), max=(4, 1))}
    outputs_of_step = (TensorSpec("next_state", "FP32", (-1, -1, 1)), *NUMBERS)
    parts = {"embed": (inputs, STATES, profile_of_inputs), "step": ((*STATES, last), outputs_of_step, profile)}
    artifacts = tuple(
        Artifact(
            file=f"{role}.onnx", runtime="any", precision="fp32", opset=17, tolerance=EXACT, role=role,
            inputs=reads, outputs=gives, profile=allowed, golden=f"{role}.golden.npz",
        )
        for role, (reads, gives, allowed) in parts.items()
    )  # fmt: skip
    names = ("state", "prompt", "last", "next_state", "prediction", "residual", "loops")
    limits = {"max_loops": MAX_LOOPS, "most_loops": MOST_LOOPS, "tolerance": TOLERANCE}
    manifest = manifest_of(
        NAME,
        inputs,
        (*NUMBERS, TensorSpec("loops", "INT32", (-1, 1))),
        profile_of_inputs,
        max_batch_size=MAX_BATCH_SIZE,
        tiers=(Tier(name="full", artifacts=artifacts),),
        program=LoopProgram(**{**dict(zip(names, names, strict=True)), **limits, **changes}),
    )
    return write_bundle(directory, manifest, files)


def loop_request(*values, tokens=3, **parameters):
    """Return a request for the loop: each value ends a prompt."""
    return with_parameters(raw_request(NAME, xs=prompt(*values, tokens=tokens)), parameters)


def array_of(response, name):
    place = [output.name for output in response.outputs].index(name)
    return np.frombuffer(response.raw_output_contents[place], np.int32 if name == "loops" else np.float32)


@contextmanager
def open_loop(bundle, cache):
    embed, step = (load_runner(bundle, "onnxruntime", cache, role=role).runner for role in ("embed", "step"))
    yield Loop(bundle.manifest.program, {"full": LoopRunners(embed, step)})
    embed.close()
    step.close()


def check_requests_that_join_and_leave(loop, seed):
    """Check the answers of requests that join a session, leave it, and are dropped, all at random."""
    random = np.random.default_rng(seed)
    session = loop.session(Options("full"))
    given = {}
    ended = []
    for _ in range(60):
        joining, room, tokens = [], MAX_BATCH_SIZE - session.rows, int(random.integers(1, TOKENS + 1))
        for _ in range(int(random.integers(1, 4))):
            rows = int(random.integers(1, 3))
            room -= rows
            if room >= 0:
                values = random.choice([1.0, 2.0, ENDLESS], rows).astype(np.float32)
                number = len(given)
                given[number] = values, LoopLimits(int(random.integers(1, 9)), float(random.choice([0.5, 0.1])))
                joining.append(
                    Joining(number, {"xs": prompt(*values, tokens=tokens)}, Options("full", given[number][1]))
                )
        if joining:
            session.add(joining)
        if random.random() < 0.2:
            session.drop(int(random.choice(list(given))))
        ended += session.step()
    assert len(ended) > 30
    for key, computed, _ in ended:
        values, limits = given[key]
        needed = np.where(values == ENDLESS, limits.max_loops, np.ceil(-np.log2(limits.tolerance)))
        loops = np.minimum(needed, limits.max_loops)
        left = np.float32(0.5) ** loops
        assert computed.outputs["loops"].ravel().tolist() == loops.tolist()
        np.testing.assert_allclose(computed.outputs["prediction"].ravel(), values * (1 - left), rtol=1e-6)
        np.testing.assert_allclose(computed.outputs["residual"].ravel(), left + (values == ENDLESS), rtol=1e-6)
        by_tolerance = (values != ENDLESS) & (needed <= limits.max_loops)
        assert computed.facts[STOPPED].tolist() == np.where(by_tolerance, BY_TOLERANCE, BY_BUDGET).tolist()
