"""Tables of Hugging Face's names for the tensors of BERT, RoBERTa, DistilBERT, ViT and GPT-2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from export.models.huggingface import (
    ROBERTA_OFFSET,
    BertFields,
    DistilbertFields,
    Fields,
    Gpt2Fields,
    RobertaFields,
    VitFields,
)


class Source(NamedTuple):
    """Location of one of our tensors in a file.

    Attributes:
        name: theirs.
        part: third of the tensor, for GPT-2's joint projection of queries, keys and values; None is all of it.
        transposed: whether a matrix is [in, out]; GPT-2's "Conv1D" keeps it so.
        leading: whether it has a leading dimension of 1, unlike ours.
        skipped: first rows that ours lacks.
    """

    name: str
    part: int | None = None
    transposed: bool = False
    leading: bool = False
    skipped: int = 0

    def shape(self, ours: torch.Size) -> list[int]:
        """Return the shape that it must have there."""
        whole = list(ours) if self.part is None else [3 * ours[0], *ours[1:]]
        whole[:1] = [whole[0] + self.skipped] if whole else []
        return [1, *whole] if self.leading else whole[::-1] if self.transposed else whole

    def ours(self, theirs: Tensor) -> Tensor:
        """Return our tensor, contiguous and in FP32."""
        tensor = theirs[0] if self.leading else theirs.T if self.transposed and theirs.dim() == 2 else theirs
        tensor = tensor[self.skipped :] if self.skipped else tensor
        return (tensor if self.part is None else tensor.chunk(3)[self.part]).float().contiguous()


class Names(NamedTuple):
    """File format of one architecture.

    Attributes:
        fields: the type of its ``config.json``.
        dim, heads: the fields that hold the model's width and the number of heads.
        required: fields that change the computation, with their only supported value, which is also the default.
        prefix: of every name in a model with a head.
        layer_prefix: before the number of a layer.
        layer: our modules within a layer to theirs.
        other: our other modules, and parameters that are outside of their modules, to theirs.
    """

    fields: type[Fields]
    dim: str
    heads: str
    required: dict[str, Any]
    prefix: str
    layer_prefix: str
    layer: dict[str, Source]
    other: dict[str, Source]

    def sources(self, ours: Iterable[str]) -> dict[str, Source]:
        """Return the location of the tensor for each name of our ``state_dict``, without the prefix."""
        found = {}
        for name in ours:
            if layered := _LAYER.fullmatch(name):
                number, module, parameter = layered.groups()
                source = self.layer[module]
                path = f"{self.layer_prefix}{number}.{source.name}.{parameter}"
            elif name in self.other:
                source = self.other[name]
                path = source.name
            else:
                module, _, parameter = name.rpartition(".")
                source = self.other[module]
                path = f"{source.name}.{parameter}"
            found[name] = source._replace(name=path)
        return found


_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")

_FEED_FORWARD = {"feed_forward.up": Source("intermediate.dense"), "feed_forward.down": Source("output.dense")}

_BERT = Names(
    fields=BertFields,
    dim="hidden_size",
    heads="num_attention_heads",
    required={"is_decoder": False, "add_cross_attention": False},
    prefix="bert.",
    layer_prefix="encoder.layer.",
    layer={
        **_FEED_FORWARD,
        "attention.q_proj": Source("attention.self.query"),
        "attention.k_proj": Source("attention.self.key"),
        "attention.v_proj": Source("attention.self.value"),
        "attention.output_proj": Source("attention.output.dense"),
        "attention_norm": Source("attention.output.LayerNorm"),
        "feed_forward_norm": Source("output.LayerNorm"),
    },
    other={
        "embeddings.word": Source("embeddings.word_embeddings"),
        "embeddings.position": Source("embeddings.position_embeddings"),
        "embeddings.segment": Source("embeddings.token_type_embeddings"),
        "embeddings.norm": Source("embeddings.LayerNorm"),
    },
)
_ROBERTA = _BERT._replace(
    fields=RobertaFields,
    prefix="roberta.",
    other={**_BERT.other, "embeddings.position": Source("embeddings.position_embeddings", skipped=ROBERTA_OFFSET)},
)

#: By ``model_type``.
NAMES: dict[str, Names] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Names(
        fields=DistilbertFields,
        dim="dim",
        heads="n_heads",
        required={},
        prefix="distilbert.",
        layer_prefix="transformer.layer.",
        layer={
            "attention.q_proj": Source("attention.q_lin"),
            "attention.k_proj": Source("attention.k_lin"),
            "attention.v_proj": Source("attention.v_lin"),
            "attention.output_proj": Source("attention.out_lin"),
            "attention_norm": Source("sa_layer_norm"),
            "feed_forward.up": Source("ffn.lin1"),
            "feed_forward.down": Source("ffn.lin2"),
            "feed_forward_norm": Source("output_layer_norm"),
        },
        other={name: source for name, source in _BERT.other.items() if name != "embeddings.segment"},
    ),
    "vit": Names(
        fields=VitFields,
        dim="hidden_size",
        heads="num_attention_heads",
        required={"qkv_bias": True},
        prefix="vit.",
        layer_prefix="encoder.layer.",
        layer={
            **_FEED_FORWARD,
            "attention.q_proj": Source("attention.attention.query"),
            "attention.k_proj": Source("attention.attention.key"),
            "attention.v_proj": Source("attention.attention.value"),
            "attention.output_proj": Source("attention.output.dense"),
            "attention_norm": Source("layernorm_before"),
            "feed_forward_norm": Source("layernorm_after"),
        },
        other={
            "embeddings.patch": Source("embeddings.patch_embeddings.projection"),
            "embeddings.summary": Source("embeddings.cls_token"),
            "embeddings.position.weight": Source("embeddings.position_embeddings", leading=True),
            "final_norm": Source("layernorm"),
        },
    ),
    "gpt2": Names(
        fields=Gpt2Fields,
        dim="n_embd",
        heads="n_head",
        required={"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        prefix="transformer.",
        layer_prefix="h.",
        layer={
            "attention.q_proj": Source("attn.c_attn", part=0, transposed=True),
            "attention.k_proj": Source("attn.c_attn", part=1, transposed=True),
            "attention.v_proj": Source("attn.c_attn", part=2, transposed=True),
            "attention.output_proj": Source("attn.c_proj", transposed=True),
            "attention_norm": Source("ln_1"),
            "feed_forward.up": Source("mlp.c_fc", transposed=True),
            "feed_forward.down": Source("mlp.c_proj", transposed=True),
            "feed_forward_norm": Source("ln_2"),
        },
        other={"embeddings.word": Source("wte"), "embeddings.position": Source("wpe"), "final_norm": Source("ln_f")},
    ),
}

#: The layer d -> d over the first token that a fine-tuned model may have: BERT's, DistilBERT's, RoBERTa's.
POOLERS = ("pooler.dense", "pre_classifier", "classifier.dense")
#: A fine-tuned model has one of these: for sequences or tokens, RoBERTa's for sequences, for spans, or GPT-2's.
CLASSIFIERS = ("classifier", "classifier.out_proj", "qa_outputs", "score")

#: Buffers that follow from the configuration, and unused heads and masks of pre-training.
IGNORED = re.compile(
    r"(.*\.)?position_ids|.*\.attn\.(masked_)?bias|(cls|lm_head)\..*|vocab_(transform|layer_norm|projector)\..*"
    r"|embeddings\.mask_token"
)
#: Suffixes of names in BERT's first checkpoints, and their names today.
OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
