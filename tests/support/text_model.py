"""A text classifier of two tiers, small enough to read: the logits count good and bad words."""

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.bundles.programs import CascadeProgram
from edge.bundles.steps import LabelPostprocess, TokenizerPreprocess
from edge.datatypes import TensorSpec
from tests.support.models import graph_of, manifest_of, serialized, tier_of

WORDS = ("[PAD]", "[UNK]", "good", "bad", "fine", "poor")
#: What each word adds to the logits of the two labels. The lean tier knows only the first two.
WEIGHTS = np.array([[0, 0], [0, 0], [0, 1], [1, 0], [0, 1], [1, 0]], np.float32)
TIERS = ("full", "lean")
LABELS = ("negative", "positive")
TEXTS = ("good good bad", "bad", "fine fine bad", "poor poor good", "good")
MAX_BATCH_SIZE, MAX_LENGTH = 8, 16


def tokenizer_of(words):
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def tokenizer_json():
    return tokenizer_of(WORDS).to_str().encode()


def weights(tier):
    return WEIGHTS if tier == "full" else np.where(np.arange(len(WORDS))[:, None] < 4, WEIGHTS, np.float32(0))


def model_of(weights, signs=None, output="logits"):
    """Embed, mask, multiply by the sign of the segment if given, and sum: [batch, tokens] to [batch, width]."""
    ids, constants = "int64[batch, tokens]", {"weights": weights, "last": np.array([2]), "tokens": np.array([1])}
    inputs, signed = f"{ids} input_ids, {ids} attention_mask", "signed = Identity(counted)"
    if signs is not None:
        inputs, constants = f"{inputs}, {ids} token_type_ids", {**constants, "signs": signs}
        signed = "sign = Gather(signs, token_type_ids) signed = Mul(counted, sign)"
    return serialized(
        graph_of(
            f"""words ({inputs}) => (float[batch, {weights.shape[1]}] {output}) {{
                each = Gather(weights, input_ids)  real = Cast<to = 1>(attention_mask)
                column = Unsqueeze(real, last)  counted = Mul(each, column)  {signed}
                {output} = ReduceSum<keepdims = 0>(signed, tokens)
            }}""",
            **constants,
        )
    )


def model(tier):
    return model_of(weights(tier))


def logits(text, tier):
    known = weights(tier)
    return np.sum([known[WORDS.index(word) if word in WORDS else 1] for word in text.split()], axis=0)


def padded(rows):
    """Return ids and mask, [rows, tokens]."""
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask


def golden(tier):
    ids, mask = padded([[WORDS.index(word) for word in text.split()] for text in TEXTS])
    return Golden(
        inputs={"input_ids": ids, "attention_mask": mask},
        outputs={"logits": np.stack([logits(text, tier) for text in TEXTS]).astype(np.float32)},
        raw={"text": np.array([[text.encode()] for text in TEXTS])},
    )


def tokenizer_step(max_length, **pair):
    names = {"input": "text", "file": "tokenizer.json", "ids": "input_ids", "mask": "attention_mask"}
    return TokenizerPreprocess(**names, max_length=max_length, pad_id=0, max_text_bytes=200, **pair)


def manifest():
    shape = Profile(min=(1, 1), opt=(1, 8), max=(MAX_BATCH_SIZE, MAX_LENGTH))
    return manifest_of(
        "sentiment",
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask")),
        (TensorSpec("logits", "FP32", (-1, 2)),),
        {"input_ids": shape, "attention_mask": shape},
        description="Counts good and bad words.",
        max_batch_size=MAX_BATCH_SIZE,
        tiers=tuple(tier_of(tier, f"{tier}.onnx", golden=f"{tier}.npz") for tier in TIERS),
        golden="full.npz",
        preprocess=tokenizer_step(MAX_LENGTH),
        postprocess=LabelPostprocess(logits="logits", output="label", labels=LABELS),
        program=CascadeProgram(lean="lean", full="full", logits="logits", margin=0.5),
    )


def files():
    tiers = {f"{tier}.onnx": model(tier) for tier in TIERS} | {f"{tier}.npz": golden(tier).encode() for tier in TIERS}
    return {"tokenizer.json": tokenizer_json(), **tiers}


def write_sentiment_bundle(directory):
    return write_bundle(directory, manifest(), files())
