"""A decoder with known results: the next letter is the sum of all letters so far, modulo 27, where 0 ends the text.

Keys have another shape than values. A wrong element of either changes the logits.
"""

import io
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Profile, Tier, Tolerance
from edge.bundles.programs import CacheTensor, GenerateProgram, HeadBase, HeadProgram
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import TensorSpec
from edge.pb import inference_pb2 as pb
from edge.programs.generate import generator
from edge.runtimes.build import load_runner
from tests.support.models import graph_of, manifest_of, serialized
from tests.support.sample_requests import raw_request, with_parameters

NAME = "letters"
MAX_BATCH_SIZE, POSITIONS, MAX_TOKENS = 4, 100, 12
LETTERS = ("<end>", *map(chr, range(ord("a"), ord("z") + 1)))
#: After this letter, in a prompt or a text, logits are not numbers.
FAILING = "z"
#: Letters that stand for bytes of characters in a text: that after "abc" is then "丹éc丹éc".
BYTES = MappingProxyType({"f": b"\xe4", "l": b"\xb8", "x": b"\xb9", "u": b"\xc3", "o": b"\xa9"})

GRAPH = """letters (int64[N, T] tokens, int64[N, 1] lengths, int64[N, 1] last,
        float[N, 1, L, 1] past_key, float[N, 2, L, 3] past_value)
    => (float[N, 27] logits, float[N, 1, T, 1] new_key, float[N, 2, T, 3] new_value) {
    values = Cast<to = 1>(tokens)  new_key = Unsqueeze(values, ends)
    negative = Neg(new_key)  new_value = Expand(negative, two_by_three)
    mean = ReduceMean<axes = [1, 3]>(past_value)  both = Sub(past_key, mean)  earlier = Squeeze(both, ends)
    shape = Shape<start = 2, end = 3>(past_key)  places_of_cache = Squeeze(shape)
    index_of_cache = Range(zero, places_of_cache, one)  is_filled = Less(index_of_cache, lengths)
    filled = Cast<to = 1>(is_filled)  kept = Mul(earlier, filled)
    twice = ReduceSum(kept, axis)  before = Div(twice, two)
    shape_of_tokens = Shape<start = 1, end = 2>(tokens)  places = Squeeze(shape_of_tokens)
    index = Range(zero, places, one)  is_read = LessOrEqual(index, last)  read = Cast<to = 1>(is_read)
    now = Mul(values, read)  summed = ReduceSum(now, axis)  total = Add(before, summed)
    next = Mod<fmod = 1>(total, count)  distance = Sub(vocabulary, next)  size = Abs(distance)
    last_token = GatherElements<axis = 1>(tokens, last)  fault = Gather(faults, last_token)
    offset = Gather(offsets, lengths)  finite = Add(size, offset)  worse = Add(finite, fault)  logits = Neg(worse)
}"""


def continued(prompt, tokens=MAX_TOKENS, *, shift=0):
    """Return the text that follows a prompt; a head may add ``shift`` to each of its letters."""
    ids = [LETTERS.index(letter) for letter in prompt]
    while len(ids) < len(prompt) + tokens and len(ids) < POSITIONS:
        ids.append((sum(ids) + shift) % len(LETTERS))
        if not ids[-1]:
            break
    return "".join(LETTERS[one] for one in ids[len(prompt) :] if one)


#: The greedy text after it has no end, and these are its first letters.
PROMPT, TEXT = "abc", continued("abc", 6)
#: The most tokens that can follow it.
MOST = POSITIONS - len(PROMPT)


def completion(**fields):
    return {"model": NAME, "prompt": PROMPT, "temperature": 0, **fields}


def spelt(text, spelling):
    return b"".join(spelling.get(letter, letter.encode()) for letter in text)


def tokenizer_of(spelling, *, byte_fallback=False):
    """Return a tokenizer of the letters; with ``byte_fallback``, each byte is a token such as ``<0xE4>``."""
    tokens = [spelling.get(letter, letter.encode()).decode("latin-1") for letter in LETTERS]
    if byte_fallback:
        tokens = [f"<0x{spelling[letter][0]:02X}>" if letter in spelling else letter for letter in LETTERS]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.ByteLevel() if spelling else decoders.Fuse()
    if byte_fallback:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def faults_of(failing):
    """Return what is added to the logits after each letter."""
    return np.array([np.nan if letter in failing else 0 for letter in LETTERS], np.float32)


def write_letters_bundle(
    directory, name=NAME, *, spelling=MappingProxyType({}), byte_fallback=False, failing=FAILING, **changes
):
    """Write the bundle; ``spelling`` has the bytes of letters that stand for no character of their own.

    ``changes`` are fields of its program. With more ``positions`` the graph stays as it is: a step fails if any of its
    rows is longer than it allows. After the letters of ``failing``, logits are not numbers.
    """
    constants = {
        "ends": np.array([1, 3]), "axis": np.array([1]), "zero": np.int64(0), "one": np.int64(1),
        "two": np.float32(2), "count": np.float32(27), "vocabulary": np.arange(27, dtype=np.float32)[None],
        "faults": faults_of(failing), "two_by_three": np.array([1, 2, 1, 3]),
        "offsets": np.zeros(POSITIONS, np.float32),
    }  # fmt: skip
    shapes = {"key": (-1, 1, -1, 1), "value": (-1, 2, -1, 3)}
    cache = [TensorSpec(f"{when}_{kind}", "FP32", shape) for when in ("past", "new") for kind, shape in shapes.items()]
    columns = tuple(TensorSpec(name, "INT64", (-1, 1)) for name in ("lengths", "last"))
    reads = (TensorSpec("tokens", "INT64", (-1, -1)), *columns, *cache[:2])
    gives = (TensorSpec("logits", "FP32", (-1, 27)), *cache[2:])
    tokens = np.array([[1, 2], [3, 4]])
    past = np.array([[5, 6, 7], [8, 9, 10]], np.float32)[:, None, :, None]
    totals = np.array([5 + 6 + 1 + 2, 8 + 3])  # two and one places are filled; the second row ends with its first token
    step = Golden(
        {"tokens": tokens, "lengths": np.array([[2], [1]]), "last": np.array([[1], [0]]), "past_key": past,
         "past_value": np.broadcast_to(-past, (2, 2, 3, 3)).copy()},
        {"logits": -np.abs(np.arange(27, dtype=np.float32) - totals[:, None]).astype(np.float32),
         "new_key": tokens[:, None, :, None].astype(np.float32),
         "new_value": np.broadcast_to(-tokens[:, None, :, None], (2, 2, 2, 3)).astype(np.float32)},
    )  # fmt: skip
    ids = np.array([[1, 2, 3], [4, 5, 0]])
    prompts = ("abc", "de")
    texts = np.array([[spelt(continued(prompt), spelling)] for prompt in prompts])
    generated = np.array([[len(continued(prompt))] for prompt in prompts], np.int32)
    raw = {"prompt": np.array([[prompt.encode()] for prompt in prompts])}
    whole = Golden({"ids": ids, "mask": (ids > 0).astype(np.int64)}, {"text": texts, "generated": generated}, raw)
    most = POSITIONS - 1
    column = Profile(min=(1, 1), opt=(2, 1), max=(MAX_BATCH_SIZE, 1))
    sequence = Profile(min=(1, 1), opt=(2, 8), max=(MAX_BATCH_SIZE, most))
    places = {
        f"past_{kind}": Profile(min=(1, heads, 1, width), opt=(2, heads, 32, width), max=(4, heads, 128, width))
        for kind, (_, heads, _, width) in shapes.items()
    }
    artifact = Artifact(
        file="decoder.onnx", runtime="any", precision="fp32", opset=17, role="backbone",
        tolerance=Tolerance(atol=0, rtol=0), inputs=reads, outputs=gives, golden="decoder.golden.npz",
        profile={"tokens": sequence, "lengths": column, "last": column, **places},
    )  # fmt: skip
    tokenizer = TokenizerPreprocess(
        input="prompt", file="tokenizer.json", ids="ids", mask="mask", max_length=most, pad_id=0, max_text_bytes=1000
    )
    names = ("tokens", "lengths", "last", "logits", "text", "generated")
    program = {
        **dict(zip(names, names, strict=True)),
        "cache": tuple(CacheTensor(past=f"past_{kind}", new=f"new_{kind}") for kind in ("key", "value")),
        "positions": POSITIONS,
        "max_tokens": MAX_TOKENS,
        "end_tokens": (0,),
    }
    manifest = manifest_of(
        name,
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask")),
        (TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("generated", "INT32", (-1, 1))),
        dict.fromkeys(("ids", "mask"), sequence),
        max_batch_size=MAX_BATCH_SIZE,
        preprocess=tokenizer,
        tiers=(Tier(name="full", artifacts=(artifact,)),),
        program=GenerateProgram(**{**program, **changes}),
    )
    files = {
        "decoder.onnx": serialized(graph_of(GRAPH, **constants)),
        "tokenizer.json": tokenizer_of(spelling, byte_fallback=byte_fallback).to_str().encode(),
        "decoder.golden.npz": step.encode(),
        "golden.npz": whole.encode(),
    }
    return write_bundle(directory, manifest, files)


@contextmanager
def open_letters(bundle, cache):
    assert isinstance(bundle.manifest.program, GenerateProgram)
    runners = [load_runner(bundle, "onnxruntime", cache, role=role).runner for role in bundle.manifest.roles]
    program = generator(bundle, bundle.manifest.program, {"full": runners})
    try:
        yield program
    finally:
        program.close()
        for runner in runners:
            runner.close()


def inputs_of(*prompts):
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = [LETTERS.index(letter) for letter in prompt]
    return {"ids": ids, "mask": (ids > 0).astype(np.int64)}


def text_of(response):
    place = [output.name for output in response.outputs].index("text")
    return response.raw_output_contents[place][4:].decode()


def text_request(*prompts, **parameters):
    data = [prompt if isinstance(prompt, bytes) else prompt.encode() for prompt in prompts]
    message = pb.ModelInferRequest(model_name=NAME)
    message.inputs.add(name="prompt", datatype="BYTES", shape=(len(data), 1)).contents.bytes_contents.extend(data)
    return with_parameters(message, parameters)


def ids_request(ids, mask, **parameters):
    """Return a request for the texts that follow ids of tokens, whose form a server remembers."""
    arrays = {"ids": np.array(ids, np.int64), "mask": np.array(mask, np.int64)}
    return with_parameters(raw_request(NAME, **arrays), parameters)


#: What the likeliest letter's successor gains; logits differ by 26 at most.
GAIN = 100.0
_SIZE = len(LETTERS)

HEAD_GRAPH = """head (float[N, V] logits, float[G, W, V] keys, float[G, V, W] values, float[G] temperatures,
        float[N, 1] alpha)
    => (float[N, V] moved) {
    by_group = Unsqueeze(temperatures, inner)  scaled = Div(logits, by_group)
    probabilities = Softmax<axis = -1>(scaled)  means = MatMul(probabilities, values)  added = MatMul(means, keys)
    sum = ReduceSum<keepdims = 0>(added, first)  change = Mul(alpha, sum)  moved = Add(logits, change)
}"""


def write_letters_head(directory, base, name, shift, *, usual_alpha=1.0, version=1):
    """Write a head that adds ``shift`` to each next letter, unless a small alpha leaves it as it is."""
    likeliest = np.eye(_SIZE, dtype=np.float32)  # the temperature makes it the only one
    keys = GAIN * np.roll(likeliest, shift, axis=1)
    tensors = io.BytesIO()
    layer = {"keys": keys[None], "values": likeliest[None], "temperatures": np.array([0.001], np.float32)}
    np.savez(tensors, **{f"0/{field}": array for field, array in layer.items()})
    logits = -np.abs(np.arange(_SIZE, dtype=np.float32) - np.array([[3], [26]], np.float32))
    alpha = np.array([[1], [0.5]], np.float32)
    golden = Golden({"logits": logits, "alpha": alpha}, {"moved": logits + alpha * keys[[3, 26]]})
    part = Golden({**golden.inputs, **layer}, golden.outputs)
    shapes = {"logits": (-1, -1), "keys": (-1, -1, -1), "values": (-1, -1, -1), "temperatures": (-1,), "alpha": (-1, 1)}
    sizes = {"logits": (0, _SIZE), "keys": (1, _SIZE, _SIZE), "values": (1, _SIZE, _SIZE), "temperatures": (1,)}
    sizes["alpha"] = (0, 1)
    profile = {field: _profile(size) for field, size in sizes.items()}
    artifact = Artifact(
        file="head.onnx", runtime="any", precision="fp32", opset=17, role="head", golden="head.golden.npz",
        tolerance=Tolerance(atol=1e-4, rtol=0), profile=profile, outputs=(TensorSpec("moved", "FP32", (-1, -1)),),
        inputs=tuple(TensorSpec(field, "FP32", shape) for field, shape in shapes.items()),
    )  # fmt: skip
    fields = ("logits", "alpha", "moved", "keys", "values", "temperatures")
    program = HeadProgram(
        base=HeadBase(name=base.manifest.name, version=base.manifest.version, sha256=base.manifest.weights_sha256),
        tensors="tensors.npz", usual_alpha=usual_alpha, **dict(zip(fields, fields, strict=True)),
    )  # fmt: skip
    manifest = manifest_of(
        name,
        (TensorSpec("logits", "FP32", (-1, _SIZE)), TensorSpec("alpha", "FP32", (-1, 1))),
        (TensorSpec("moved", "FP32", (-1, _SIZE)),),
        {field: profile[field] for field in ("logits", "alpha")},
        version=version,
        max_batch_size=MAX_BATCH_SIZE,
        tiers=(Tier(name="full", artifacts=(artifact,)),),
        program=program,
    )
    files = {
        "head.onnx": serialized(graph_of(HEAD_GRAPH, inner=np.array([1, 2]), first=np.array([0]))),
        "tensors.npz": tensors.getvalue(),
        "golden.npz": golden.encode(),
        "head.golden.npz": part.encode(),
    }
    return write_bundle(directory, manifest, files)


def _profile(size):  # 0 stands for its rows
    least, usual, most = (tuple(one or rows for one in size) for rows in (1, 2, MAX_BATCH_SIZE))
    return Profile(min=least, opt=usual, max=most)
