"""A model that finds answers, small enough to read: tokens are bytes, and logits waves of the tokens so far."""

import math

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.bundles.steps import SpanPostprocess, TokenizerPreprocess, WindowShape
from edge.datatypes import TensorSpec
from tests.support.models import graph_of, manifest_of, serialized, tier_of

NAME = "finder"
SPECIAL = ("[PAD]", "[CLS]", "[SEP]")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
INPUTS = ("input_ids", "attention_mask", "token_offsets")
LOGITS = ("start_logits", "end_logits")
MAX_BATCH_SIZE, MAX_LENGTH, QUESTION, STRIDE, MOST_TOKENS = 24, 20, 5, 3, 4
#: How much each token turns the waves of both logits.
TURNS = np.random.default_rng(0).uniform(-2, 2, (2, len(SPECIAL) + len(BYTES))).astype(np.float32)
TURNS[:, len(SPECIAL) + BYTES.index("~")] = np.inf  # of which the logits are NaN
GOLDEN = (("who?", "the cat"), ("where sat it", "on the mat, déjà vu 🙂"))


def tokenizer():
    """Return a tokenizer of bytes that frames pairs as BERT does."""
    made = Tokenizer(BPE({token: number for number, token in enumerate((*SPECIAL, *BYTES))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def model():
    ids = "int64[batch, tokens]"
    return serialized(
        graph_of(
            f"""finder ({ids} input_ids, {ids} attention_mask, int64[batch, tokens, 2] token_offsets) =>
                (float[batch, tokens] start_logits, float[batch, tokens] end_logits, int64[batch, tokens, 2] offsets) {{
                first = Gather(starts, input_ids)  first_angle = CumSum(first, axis)  first_wave = Sin(first_angle)
                last = Gather(ends, input_ids)  last_angle = CumSum(last, axis)  last_wave = Sin(last_angle)
                start_logits = Mul(first_wave, height)  end_logits = Mul(last_wave, height)
                offsets = Identity(token_offsets)
            }}""",
            starts=TURNS[0],
            ends=TURNS[1],
            axis=np.array(1),
            height=np.array(3, np.float32),
        )
    )


def logits(ids):
    """Return both logits for token ids, [tokens] or [rows, tokens]."""
    return [3 * np.sin(np.cumsum(turns[np.asarray(ids)], axis=-1, dtype=np.float32)) for turns in TURNS]


def rows_of(question, context):
    """Return the bytes of a pair's windows as ids, with the characters of the context's bytes, and their windows."""
    made = tokenizer()
    asked = made.encode(question, add_special_tokens=False).ids[:QUESTION]
    read = made.encode(context, add_special_tokens=False)
    room = MAX_LENGTH - 3 - len(asked)
    windows = [range(min(room, len(read.ids)))]
    while windows[-1].stop < len(read.ids):
        begin = windows[-1].stop - STRIDE
        windows.append(range(begin, min(begin + room, len(read.ids))))
    rows = [[1, *asked, 2, *(read.ids[place] for place in window), 2] for window in windows]
    return rows, read.offsets, windows, 2 + len(asked)


def searched(question, context, *, no_answer=False):
    """Return the characters of all possible answers to their scores, (0, 0) for none: a search without a shortcut."""
    rows, offsets, windows, before = rows_of(question, context)
    sums, first, last, none = {}, {}, {}, []
    for ids, window in zip(rows, windows, strict=True):
        start, end = (values.astype(float).tolist() for values in logits(ids))
        none.append((start[0] + end[0], start[0], end[0]))
        for i in window:
            first[i] = max(first.get(i, -math.inf), start[before + i - window.start])
            last[i] = max(last.get(i, -math.inf), end[before + i - window.start])
            for j in range(i, min(i + MOST_TOKENS, window.stop)):
                begin, stop = offsets[i][0], offsets[j][1]
                while begin < stop and context[begin].isspace():
                    begin += 1
                while begin < stop and context[stop - 1].isspace():
                    stop -= 1
                if begin < stop:
                    found = start[before + i - window.start] + end[before + j - window.start]
                    sums[begin, stop] = max(sums.get((begin, stop), -math.inf), found)
    value, start_none, end_none = min(none)
    if no_answer:
        sums[0, 0] = value
    total = [sum(map(math.exp, [*found.values(), one])) for found, one in ((first, start_none), (last, end_none))]
    return {span: math.exp(value) / total[0] / total[1] for span, value in sums.items()}


def step(**fields):
    defaults = {"max_length": MAX_LENGTH, "windows": WindowShape(question_tokens=QUESTION, stride=STRIDE)}
    return TokenizerPreprocess(
        input="question",
        pair="context",
        file="tokenizer.json",
        ids=INPUTS[0],
        mask=INPUTS[1],
        offsets=INPUTS[2],
        pad_id=0,
        max_text_bytes=200,
        **{**defaults, **fields},
    )


def spans(**fields):
    names = {"start_logits": LOGITS[0], "end_logits": LOGITS[1], "answer": "answer", "score": "score"}
    return SpanPostprocess(**{**names, "start": "start", "end": "end", "most_tokens": MOST_TOKENS, **fields})


def golden():
    made = tokenizer()
    firsts = [(rows_of(*pair), made.encode(*pair)) for pair in GOLDEN]
    length = max(len(rows[0]) for (rows, *_), _ in firsts)
    ids, mask = np.zeros((2, len(GOLDEN), length), np.int64)
    offsets = np.zeros((len(GOLDEN), length, 2), np.int64)
    for row, ((rows, of_context, windows, before), encoding) in enumerate(firsts):
        tokens = rows[0]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        offsets[row, :before] = [*encoding.offsets[: before - 1], (0, 0)]
        offsets[row, before : len(tokens) - 1] = of_context[: len(windows[0])]
    start, end = logits(ids)
    texts = np.array([[text.encode() for text in pair] for pair in GOLDEN])
    return Golden(
        inputs=dict(zip(INPUTS, (ids, mask, offsets), strict=True)),
        outputs={"start_logits": start, "end_logits": end, "offsets": offsets},
        raw={"question": texts[:, :1], "context": texts[:, 1:]},
    )


def manifest(name=NAME, **fields):
    shape = Profile(min=(1, 1), opt=(1, 8), max=(MAX_BATCH_SIZE, MAX_LENGTH))
    pairs = Profile(min=(1, 1, 2), opt=(1, 8, 2), max=(MAX_BATCH_SIZE, MAX_LENGTH, 2))
    defaults = {"max_batch_size": MAX_BATCH_SIZE, "preprocess": step(), "postprocess": spans()}
    return manifest_of(
        name,
        (*(TensorSpec(name, "INT64", (-1, -1)) for name in INPUTS[:2]), TensorSpec(INPUTS[2], "INT64", (-1, -1, 2))),
        (*(TensorSpec(name, "FP32", (-1, -1)) for name in LOGITS), TensorSpec("offsets", "INT64", (-1, -1, 2))),
        {INPUTS[0]: shape, INPUTS[1]: shape, INPUTS[2]: pairs},
        tiers=(tier_of(atol=1e-4),),
        **{**defaults, **fields},
    )


def write_finder_bundle(directory, **fields):
    files = {"tokenizer.json": tokenizer().to_str().encode(), "model.onnx": model(), "golden.npz": golden().encode()}
    return write_bundle(directory, manifest(**fields), files)
