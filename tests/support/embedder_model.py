"""An embedder, small enough to read: the embedding of a text is the sum of its words' vectors."""

import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from tests.support.models import manifest_of
from tests.support.text_model import model_of, padded, tokenizer_json, tokenizer_step

NAME = "embedder"
WORDS = ("[PAD]", "[UNK]", "good", "bad", "fine", "poor")
VECTORS = np.array([[0, 0, 0], [1, 0, 0], [0, 2, 0], [0, -2, 0], [0, 1, 2], [3, -1, 0.5]], np.float32)
TEXTS = ("good good bad", "bad", "fine fine bad", "poor poor good", "good")
MAX_BATCH_SIZE, MAX_LENGTH = 8, 16


def ids(text):
    return [WORDS.index(word) if word in WORDS else 1 for word in text.split()][:MAX_LENGTH]


def embeddings(texts):
    return np.stack([VECTORS[ids(text)].sum(axis=0) for text in texts]).astype(np.float32)


def write_embedder_bundle(directory, max_length=MAX_LENGTH, unknown=(1, 0, 0)):
    """Write the bundle; ``unknown`` is the vector of other words than those above."""
    shape = Profile(min=(1, 1), opt=(1, 8), max=(MAX_BATCH_SIZE, max_length))
    manifest = manifest_of(
        NAME,
        tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask")),
        (TensorSpec("embedding", "FP32", (-1, 3)),),
        {"input_ids": shape, "attention_mask": shape},
        description="Adds the vectors of words.",
        max_batch_size=MAX_BATCH_SIZE,
        preprocess=tokenizer_step(max_length),
    )
    inputs = dict(zip(("input_ids", "attention_mask"), padded([ids(text) for text in TEXTS]), strict=True))
    raw = {"text": np.array([[text.encode()] for text in TEXTS])}
    golden = Golden(inputs, {"embedding": embeddings(TEXTS)}, raw).encode()
    model = model_of(np.vstack([VECTORS[:1], [unknown], VECTORS[2:]]).astype(np.float32), output="embedding")
    return write_bundle(
        directory, manifest, {"tokenizer.json": tokenizer_json(), "model.onnx": model, "golden.npz": golden}
    )
