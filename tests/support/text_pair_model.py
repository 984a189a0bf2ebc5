"""A regression on pairs of texts, small enough to read: how much better the words of the first are."""

import numpy as np
from tokenizers.processors import TemplateProcessing

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.bundles.steps import ScorePostprocess
from edge.datatypes import TensorSpec
from tests.support.models import manifest_of
from tests.support.text_model import model_of, padded, tokenizer_of, tokenizer_step

NAME = "better"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad")
#: What each word is worth.
WORTH = np.array([[0], [0], [0], [0], [1], [-1]], np.float32)
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PAIRS = (("good good", "bad"), ("bad", "bad good good"), ("good", "good"), ("what", "bad bad bad"))
MAX_BATCH_SIZE, MAX_LENGTH = 8, 12


def tokenizer_json():
    """Return a tokenizer that frames pairs as BERT does."""
    tokenizer = tokenizer_of(WORDS)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str().encode()


def model():
    """Worth of each token, minus where the segment is 1, nothing where the mask is 0: [batch, tokens] to [batch, 1]."""
    return model_of(WORTH, np.array([[1], [-1]], np.float32))


def scores(pairs):
    def worth(text):
        return text.split().count("good") - text.split().count("bad")

    return np.array([[worth(first) - worth(second)] for first, second in pairs], np.float32)


def golden():
    rows = [[2, *_ids(first), 3, *_ids(second), 3] for first, second in PAIRS]
    ids, mask = padded(rows)
    segments = np.zeros_like(ids)
    for row, (first, _) in enumerate(PAIRS):
        segments[row, len(_ids(first)) + 2 : len(rows[row])] = 1
    texts = np.array([[text.encode() for text in pair] for pair in PAIRS])
    return Golden(
        inputs=dict(zip(INPUTS, (ids, mask, segments), strict=True)),
        outputs={"logits": scores(PAIRS)},
        raw={"text": texts[:, :1], "text_pair": texts[:, 1:]},
    )


def _ids(text):
    return [WORDS.index(word) if word in WORDS else 1 for word in text.split()]


def manifest():
    shape = Profile(min=(1, 1), opt=(1, 8), max=(MAX_BATCH_SIZE, MAX_LENGTH))
    return manifest_of(
        NAME,
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in INPUTS),
        (TensorSpec("logits", "FP32", (-1, 1)),),
        dict.fromkeys(INPUTS, shape),
        description="How much better the words of one text are than those of another.",
        max_batch_size=MAX_BATCH_SIZE,
        preprocess=tokenizer_step(MAX_LENGTH, pair="text_pair", segments="token_type_ids"),
        postprocess=ScorePostprocess(logits="logits", output="score"),
    )


def files():
    return {"tokenizer.json": tokenizer_json(), "model.onnx": model(), "golden.npz": golden().encode()}


def write_pair_bundle(directory):
    return write_bundle(directory, manifest(), files())
