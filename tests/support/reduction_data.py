"""Small transformers and inputs whose activations have directions that matter and others that do not."""

import numpy as np
import torch

from export.data.tokens import Encoded
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.reduce.grid import Times
from export.reduce.plan import macs_per_token

VOCABULARY = 40


def config(architecture="bert", layers=2, heads=4, head_dim=8, ffn_dim=48, dim=24, relative_buckets=0):
    shapes = (LayerShape(heads, head_dim, ffn_dim),) * layers
    sizes = {"vocab_size": VOCABULARY, "max_positions": 32, "segments": 2 if architecture == "bert" else 0}
    return TransformerConfig(
        architecture=architecture, dim=dim, layers=shapes, relative_buckets=relative_buckets, **sizes
    )


def model(seed=0, **options):
    """A classifier with large weights, and so with attention that is far from even, of anisotropic embeddings."""
    torch.manual_seed(seed)
    transformer = Transformer(config(**options))
    with torch.no_grad():
        for parameter in transformer.layers.parameters():
            if parameter.dim() > 1:
                parameter *= 3
            else:
                parameter += 0.3 * torch.randn_like(parameter)
        embedding = transformer.embeddings.word.weight
        embedding *= torch.logspace(1, -1.5, embedding.shape[1])
    return SequenceClassifier(transformer, labels=3).eval()


def inputs(rows=48, seed=0):
    random = np.random.default_rng(seed)
    tokens = tuple(random.integers(VOCABULARY, size=random.integers(4, 16)).astype(np.int32) for _ in range(rows))
    return Encoded(tokens, tuple(np.zeros(len(row), dtype=np.int32) for row in tokens), random.integers(3, size=rows))


def batches(rows=48, seed=0):
    encoded = inputs(rows, seed)
    return [encoded.batch(np.arange(start, min(start + 16, rows))) for start in range(0, rows, 16)]


def mac_times(settings, grid, tokens, rest=0.0):
    """Return the times of a layer's options as if every multiplication took the same time, a dense layer one ms."""
    whole = macs_per_token(settings.dim, settings.layers[0], tokens)
    layers = [
        [macs_per_token(settings.dim, LayerShape(*heads, units), tokens) / whole for units in grid.feed_forward]
        for heads in grid.attention
    ]
    return Times(grid, np.maximum(layers, 0.01), rest)
