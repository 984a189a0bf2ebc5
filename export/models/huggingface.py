"""Hugging Face model directories, ``config.json`` and safetensors, as :class:`export.models.transformer.Transformer`.

BERT (MiniLM is one), RoBERTa, XLM-RoBERTa, MPNet, DistilBERT and ViT. The fields, and the name and shape of every
tensor, are checked before the first weight is read. The package ``transformers`` is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from edge.bundles.fields import FileName
from edge.errors import Raw
from export.errors import CheckpointError
from export.models.transformer import LayerShape, Transformer, TransformerConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_FIX = "Download the model again, or give one of BERT, RoBERTa, MPNet, DistilBERT or ViT in the safetensors format."
#: Ways out for models that are not supported here, and for malformed files of a fine-tuned one.
PACK = "Export the model to ONNX, and give the file to 'fewheads pack', with --tokenizer if clients send texts."
SAVE_AGAIN = "Save it again with save_pretrained of transformers or sentence-transformers."
#: Types of weights as safetensors names them; all become FP32.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: The layer d -> d over the first token that a fine-tuned model may have: BERT's, DistilBERT's, RoBERTa's.
POOLERS = ("pooler.dense", "pre_classifier", "classifier.dense")
#: A fine-tuned model has one of these: for sequences or tokens, RoBERTa's for sequences, or for spans.
CLASSIFIERS = ("classifier", "classifier.out_proj", "qa_outputs")
#: Buffers that follow from the configuration, and unused heads and masks of pre-training.
_IGNORED = re.compile(
    r"(.*\.)?position_ids|(cls|lm_head)\..*|vocab_(transform|layer_norm|projector)\..*|embeddings\.mask_token"
)
#: Suffixes of names in BERT's first checkpoints, and their names today.
_OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
#: Rows of RoBERTa's position embeddings before that of the first token: the padding's number, 1, and one more.
_ROBERTA_OFFSET = 2
_POSITIONS = "embeddings.position.weight"

T = TypeVar("T")
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


class Pretrained(NamedTuple):
    """Contents of a Hugging Face directory.

    Attributes:
        transformer: the model without a head, in FP32 and evaluation mode.
        pooler: the layer d -> d over the first token, before its activation; None if there is none.
        classifier: the head of a fine-tuned model, d -> labels; None if there is none.
    """

    transformer: Transformer
    pooler: nn.Linear | None
    classifier: nn.Linear | None


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``config.json`` that shape a model; the last two names of GELU are its tanh approximation."""

    hidden_size: _Positive
    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    intermediate_size: _Positive
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"]
    layer_norm_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-12

    def config(self, **embeddings: Any) -> TransformerConfig:
        head_dim = self.hidden_size // self.num_attention_heads
        shape = LayerShape(self.num_attention_heads, head_dim, self.intermediate_size)
        return TransformerConfig(
            dim=self.hidden_size,
            layers=(shape,) * self.num_hidden_layers,
            norm_eps=self.layer_norm_eps,
            tanh_gelu=self.hidden_act != "gelu",
            **embeddings,
        )


class _Bert(_Fields, frozen=True, kw_only=True):
    vocab_size: _Positive
    max_position_embeddings: _Positive
    type_vocab_size: _Positive
    position_embedding_type: Literal["absolute"] = "absolute"

    def config(self, **embeddings: Any) -> TransformerConfig:
        text = {
            "vocab_size": self.vocab_size,
            "max_positions": self.max_position_embeddings,
            "segments": self.type_vocab_size,
        }
        return super().config(architecture="bert", **(text | embeddings))


class _Roberta(_Bert, frozen=True, kw_only=True):
    pad_token_id: Literal[1] = 1

    def config(self, **embeddings: Any) -> TransformerConfig:
        return super().config(max_positions=self.max_position_embeddings - _ROBERTA_OFFSET)


class _Mpnet(_Roberta, frozen=True, kw_only=True):
    type_vocab_size: Literal[0] = 0
    relative_attention_num_buckets: Literal[32] = 32  # transformers has 32, whatever the configuration says

    def config(self, **embeddings: Any) -> TransformerConfig:
        return msgspec.structs.replace(super().config(), relative_buckets=self.relative_attention_num_buckets)


class _Distilbert(_Bert, frozen=True, kw_only=True):
    hidden_size: _Positive = msgspec.field(name="dim")
    num_hidden_layers: _Positive = msgspec.field(name="n_layers")
    num_attention_heads: _Positive = msgspec.field(name="n_heads")
    intermediate_size: _Positive = msgspec.field(name="hidden_dim")
    hidden_act: Literal["gelu"] = msgspec.field(default="gelu", name="activation")
    type_vocab_size: int = 0


class _Vit(_Fields, frozen=True, kw_only=True):
    image_size: _Positive
    patch_size: _Positive
    num_channels: _Positive

    def config(self, **embeddings: Any) -> TransformerConfig:
        return super().config(
            architecture="vit",
            image_size=self.image_size,
            patch_size=self.patch_size,
            channels=self.num_channels,
            max_positions=(self.image_size // self.patch_size) ** 2 + 1,
        )


class Format(NamedTuple):
    """File format of one architecture.

    Attributes:
        fields: the type of its ``config.json``.
        required: fields that change the computation, with their only supported value, which is also the default.
        prefix: of every name in a model with a head.
        layers: before the number of a layer.
        modules: ours to theirs, those of a layer without its number.
        shared: modules of ours, in every layer, for which a file has one tensor.
    """

    fields: type[_Fields]
    required: dict[str, bool]
    prefix: str
    layers: str
    modules: dict[str, str]
    shared: frozenset[str] = frozenset()

    def names(self, ours: Iterable[str]) -> dict[str, str]:
        """Return the name in a file, without the prefix, of each name of our ``state_dict``."""
        found = {}
        for name in ours:
            number, path = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
            module, _, parameter = path.rpartition(".")
            theirs = self.modules[path] if path in self.modules else f"{self.modules[module]}.{parameter}"
            found[name] = theirs if number is None or module in self.shared else f"{self.layers}{number}.{theirs}"
        return found

    def shape(self, name: str, ours: torch.Size) -> list[int]:
        """Return the shape that one of our tensors has in a file."""
        if name == _POSITIONS and self.fields is _Vit:
            return [1, *ours]
        return [ours[0] + _ROBERTA_OFFSET, *ours[1:]] if name == _POSITIONS and self._offset else [*ours]

    def tensor(self, name: str, theirs: Tensor) -> Tensor:
        """Return one of our tensors, contiguous and in FP32."""
        if name == _POSITIONS and (self._offset or self.fields is _Vit):
            theirs = theirs[0] if self.fields is _Vit else theirs[_ROBERTA_OFFSET:]
        return theirs.float().contiguous()

    @property
    def _offset(self) -> bool:
        return issubclass(self.fields, _Roberta)


_FEED_FORWARD = {"feed_forward.up": "intermediate.dense", "feed_forward.down": "output.dense"}
_TEXT = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_BERT = Format(
    _Bert,
    {"is_decoder": False, "add_cross_attention": False},
    "bert.",
    "encoder.layer.",
    {
        **_FEED_FORWARD,
        **_TEXT,
        "embeddings.segment": "embeddings.token_type_embeddings",
        "attention.q_proj": "attention.self.query",
        "attention.k_proj": "attention.self.key",
        "attention.v_proj": "attention.self.value",
        "attention.output_proj": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward_norm": "output.LayerNorm",
    },
)
_ROBERTA = _BERT._replace(fields=_Roberta, prefix="roberta.")
_MPNET = {f"attention.{ours}_proj": f"attention.attn.{ours[0]}" for ours in ("q", "k", "v", "output")}
_MPNET |= {"attention_norm": "attention.LayerNorm", "attention.relative": "encoder.relative_attention_bias"}
#: By ``model_type``.
FORMATS = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "mpnet": _BERT._replace(
        fields=_Mpnet, prefix="mpnet.", modules=_BERT.modules | _MPNET, shared=frozenset({"attention.relative"})
    ),
    "distilbert": Format(
        _Distilbert,
        {},
        "distilbert.",
        "transformer.layer.",
        {
            **_TEXT,
            "attention.q_proj": "attention.q_lin",
            "attention.k_proj": "attention.k_lin",
            "attention.v_proj": "attention.v_lin",
            "attention.output_proj": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "feed_forward.up": "ffn.lin1",
            "feed_forward.down": "ffn.lin2",
            "feed_forward_norm": "output_layer_norm",
        },
    ),
    "vit": Format(
        _Vit,
        {"qkv_bias": True},
        "vit.",
        "encoder.layer.",
        {
            **_FEED_FORWARD,
            "attention.q_proj": "attention.attention.query",
            "attention.k_proj": "attention.attention.key",
            "attention.v_proj": "attention.attention.value",
            "attention.output_proj": "attention.output.dense",
            "attention_norm": "layernorm_before",
            "feed_forward_norm": "layernorm_after",
            "embeddings.patch": "embeddings.patch_embeddings.projection",
            "embeddings.summary": "embeddings.cls_token",
            _POSITIONS: "embeddings.position_embeddings",
            "final_norm": "layernorm",
        },
    ),
}


class _Stored(NamedTuple):
    path: Path
    name: str
    datatype: str
    shape: list[int]


class _Index(msgspec.Struct):
    weight_map: dict[str, FileName]


def load_pretrained(directory: str | Path) -> Pretrained:
    """Read a model.

    Args:
        directory: holds ``config.json`` and ``model.safetensors``, or an index and the files that it names.

    Raises:
        CheckpointError: a file is missing or malformed; the architecture is unknown, or a variant that is not computed
            here; heads do not divide the width; a tensor is missing, unknown, of another shape or not finite.
    """
    directory = Path(directory)
    config, form = _read_config(directory / CONFIG)
    stored = _stored(directory, form)
    with torch.device("meta"):  # shapes without memory
        transformer = Transformer(config)
        heads = _heads(stored, config.dim)
    wanted = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    names = form.names(wanted)
    shapes = {names[name]: form.shape(name, shape) for name, shape in wanted.items()}
    for path, head in heads.items():
        shapes |= {f"{path}.{name}": list(tensor.shape) for name, tensor in head.state_dict().items()}
    _check(directory, stored, shapes)
    weights = {name: form.tensor(name, _tensor(stored[theirs])) for name, theirs in names.items()}
    transformer.load_state_dict(weights, assign=True)
    for path, head in heads.items():
        weights = {name: _tensor(stored[f"{path}.{name}"]).float().contiguous() for name in head.state_dict()}
        head.load_state_dict(weights, assign=True)
    pooler, classifier = (
        next((heads[path] for path in paths if path in heads), None) for paths in (POOLERS, CLASSIFIERS)
    )
    return Pretrained(transformer.eval(), pooler, classifier)


def read_json(path: Path, kind: type[T], fix: str = _FIX) -> T:
    """Read a JSON file of a Hugging Face directory.

    Raises:
        CheckpointError: it is missing, or a field has another type; with ``fix`` as the way out.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}", given=Raw(error.strerror), expected="a file", fix=fix) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        expected = "the JSON of a Hugging Face model"
        raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None


def _read_config(path: Path) -> tuple[TransformerConfig, Format]:
    given = read_json(path, dict[str, Any])
    architecture = given.get("model_type")
    if architecture not in FORMATS:
        raise _broken(f"{path} field model_type", architecture, f"one of {', '.join(FORMATS)}")
    form = FORMATS[architecture]
    for field, only in form.required.items():
        if given.get(field, only) != only:
            raise _broken(f"{path} field {field}", given[field], f"{only}, the only variant that is supported")
    fields = read_json(path, form.fields)
    names = dict(zip(fields.__struct_fields__, fields.__struct_encode_fields__, strict=True))
    if fields.hidden_size % fields.num_attention_heads:
        subject = f"{path} field {names['num_attention_heads']}"
        expected = f"a divisor of {names['hidden_size']}, {fields.hidden_size}"
        raise _broken(subject, fields.num_attention_heads, expected)
    config = fields.config()
    if config.architecture == "vit" and config.image_size % config.patch_size:
        raise _broken(f"{path} field patch_size", config.patch_size, f"a divisor of image_size, {config.image_size}")
    return config, form


def _stored(directory: Path, form: Format) -> dict[str, _Stored]:
    """Return the tensors of the files by today's names without prefix; buffers and unused heads are left out."""
    files = [WEIGHTS]
    if (directory / INDEX).exists():
        files = sorted({*read_json(directory / INDEX, _Index).weight_map.values()})
    found = {}
    for tensor in (tensor for file in files for tensor in _tensors_of(directory / file)):
        name = tensor.name.removeprefix(form.prefix)
        for old, new in _OLD_ENDS.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if not _IGNORED.fullmatch(name):
            found[name] = tensor
    return found


def _tensors_of(path: Path) -> Iterator[_Stored]:
    if not path.is_file():
        raise _broken(str(path), Raw("nothing there"), "a file")
    try:
        with safe_open(path, "pt") as file:  # reads the header only
            for name in file.keys():  # noqa: SIM118 - it is not a dictionary
                part = file.get_slice(name)
                yield _Stored(path, name, part.get_dtype(), part.get_shape())
    except (SafetensorError, OSError) as error:
        raise _broken(str(path), Raw(error), "a safetensors file") from None


def _heads(stored: Mapping[str, _Stored], dim: int) -> dict[str, nn.Linear]:
    """Return the heads in the files, d -> rows of the stored weight, and d -> d for a pooler."""
    found = {}
    for path in (*POOLERS, *CLASSIFIERS):
        if f"{path}.weight" in stored:
            rows = dim if path in POOLERS else next(iter(stored[f"{path}.weight"].shape), 0)
            found[path] = nn.Linear(dim, rows, bias=f"{path}.bias" in stored)
    return found


def _check(directory: Path, stored: Mapping[str, _Stored], shapes: Mapping[str, list[int]]) -> None:
    for name in sorted(stored.keys() ^ shapes.keys()):
        given = "a tensor that this architecture lacks" if name in stored else "no such tensor"
        raise _broken(f"{directory} tensor {name!r}", Raw(given), "the tensors that follow from config.json")
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape or tensor.datatype not in _FLOATS:
            given = Raw(f"{tensor.datatype} {tensor.shape}")
            raise _broken(f"{tensor.path} tensor {tensor.name!r}", given, f"{shape} of {', '.join(_FLOATS)}")


def _tensor(stored: _Stored) -> Tensor:
    with safe_open(stored.path, "pt") as file:
        tensor: Tensor = file.get_tensor(stored.name)
    if not torch.isfinite(tensor).all():
        raise _broken(f"{stored.path} tensor {stored.name!r}", Raw("NaN or Inf"), "finite weights")
    return tensor


def _broken(subject: str, given: object, expected: str) -> CheckpointError:
    return CheckpointError(subject, given=given, expected=expected, fix=_FIX)
