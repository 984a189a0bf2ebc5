"""Fields of Hugging Face's ``config.json`` that shape a model: BERT, RoBERTa, DistilBERT, ViT and GPT-2."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from export.models.transformer import LayerShape, TransformerConfig

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Epsilon = Annotated[float, msgspec.Meta(gt=0)]
#: The names of GELU; the last two are its tanh approximation.
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh"]
#: Rows of RoBERTa's position embeddings before that of the first token: the padding's number, 1, and one more.
ROBERTA_OFFSET = 2


class _Encoder(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    hidden_act: Activation
    layer_norm_eps: Epsilon = 1e-12

    def common(self) -> dict[str, Any]:
        """Return the arguments of a configuration that follow from these fields."""
        shape = LayerShape(
            self.num_attention_heads, self.hidden_size // self.num_attention_heads, self.intermediate_size
        )
        return {
            "dim": self.hidden_size,
            "layers": (shape,) * self.num_hidden_layers,
            "norm_eps": self.layer_norm_eps,
            "tanh_gelu": self.hidden_act != "gelu",
        }


class BertFields(_Encoder, frozen=True, kw_only=True):
    """BERT's ``config.json``, as far as it shapes the model."""

    vocab_size: Positive
    max_position_embeddings: Positive
    type_vocab_size: Positive
    position_embedding_type: Literal["absolute"] = "absolute"

    def config(self) -> TransformerConfig:
        """Return the configuration."""
        return TransformerConfig(
            architecture="bert",
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            segments=self.type_vocab_size,
            **self.common(),
        )


class VitFields(_Encoder, frozen=True, kw_only=True):
    """ViT's ``config.json``, as far as it shapes the model."""

    image_size: Positive
    patch_size: Positive
    num_channels: Positive

    def config(self) -> TransformerConfig:
        """Return the configuration."""
        return TransformerConfig(
            architecture="vit",
            image_size=self.image_size,
            patch_size=self.patch_size,
            channels=self.num_channels,
            max_positions=(self.image_size // self.patch_size) ** 2 + 1,
            **self.common(),
        )


class Gpt2Fields(msgspec.Struct, frozen=True, kw_only=True):
    """GPT-2's ``config.json``, as far as it shapes the model; without ``n_inner`` the feed-forward is 4 d wide."""

    vocab_size: Positive
    n_positions: Positive
    n_embd: Positive
    n_layer: Positive
    n_head: Positive
    n_inner: Positive | None = None
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: Epsilon = 1e-5

    def config(self) -> TransformerConfig:
        """Return the configuration."""
        shape = LayerShape(self.n_head, self.n_embd // self.n_head, self.n_inner or 4 * self.n_embd)
        return TransformerConfig(
            architecture="gpt2",
            dim=self.n_embd,
            layers=(shape,) * self.n_layer,
            vocab_size=self.vocab_size,
            max_positions=self.n_positions,
            norm_eps=self.layer_norm_epsilon,
            tanh_gelu=self.activation_function != "gelu",
        )


class RobertaFields(BertFields, frozen=True, kw_only=True):
    """RoBERTa's and XLM-RoBERTa's ``config.json``: BERT's, but that positions begin behind the padding's."""

    pad_token_id: Literal[1] = 1

    def config(self) -> TransformerConfig:
        """Return the configuration, without the positions that no token has."""
        config = BertFields.config(self)
        return msgspec.structs.replace(config, max_positions=config.max_positions - ROBERTA_OFFSET)


class DistilbertFields(msgspec.Struct, frozen=True, kw_only=True):
    """DistilBERT's ``config.json``, as far as it shapes the model: a BERT without segments."""

    vocab_size: Positive
    max_position_embeddings: Positive
    dim: Positive
    n_layers: Positive
    n_heads: Positive
    hidden_dim: Positive
    activation: Literal["gelu"] = "gelu"

    def config(self) -> TransformerConfig:
        """Return the configuration."""
        shape = LayerShape(self.n_heads, self.dim // self.n_heads, self.hidden_dim)
        return TransformerConfig(
            architecture="bert",
            dim=self.dim,
            layers=(shape,) * self.n_layers,
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            norm_eps=1e-12,  # a constant of the architecture
        )


Fields = BertFields | RobertaFields | DistilbertFields | VitFields | Gpt2Fields
