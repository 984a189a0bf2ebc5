"""Causal language models of transformers: their directories, and frozen ones with what a head on them reads.

``transformers`` is imported by the functions that need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from edge.errors import Raw, UsageError
from edge.files import replaced_directory, write_durably
from export.errors import CheckpointError
from export.generate.files import INDEX, TOKENIZER_CONFIG, WEIGHTS, tokenizer_files
from export.generate.tokenizer import TextTokenizer
from export.training.device import DeviceName, device_of
from export.training.runs import CONFIG, TOKENIZER

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedModel

#: Values of ``model_type`` in ``config.json``.
ARCHITECTURES = ("gpt2", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2")
_FIX = f"Give a model of {', '.join(ARCHITECTURES)} as transformers saves it, with safetensors."
_CHUNK_BYTES = 2**20


class ReadOut(NamedTuple):
    """From hidden states to the logits of the frozen model: its last layer's weight [V, E], and :func:`softcapped`."""

    weight: Tensor
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return z [N, V] for states [N, E]."""
        return softcapped(functional.linear(hidden, self.weight), self.softcap)


def read_out_of(model: Any) -> ReadOut:
    """Return the read-out of a causal model of transformers."""
    return ReadOut(model.get_output_embeddings().weight, getattr(model.config, "final_logit_softcapping", None))


def softcapped(values: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(x / c), as in Gemma 2; None caps nothing."""
    return values if cap is None else cap * torch.tanh(values / cap)


def new_gpt2(vocabulary: int, dim: int, layers: int, heads: int, positions: int, *, end: int) -> GPT2LMHeadModel:
    """Return a model of GPT-2's architecture with random weights from torch's generator, without dropout.

    The embeddings are also the last layer's weights, as in GPT-2.

    Args:
        positions: the most tokens of a text.
        end: id of the token that ends a text.

    Raises:
        UsageError: transformers is not installed.
    """
    transformers = transformers_package()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    model: GPT2LMHeadModel = transformers.GPT2LMHeadModel(config)
    return model


def load_backbone(directory: str | Path) -> PreTrainedModel:
    """Return a model of one of :data:`ARCHITECTURES` in FP32 and evaluation mode; nothing is downloaded.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is another one, or weights are missing, of
            another shape or not finite.
        UsageError: transformers is not installed.
    """
    directory = Path(directory)
    architecture = _configuration(directory / CONFIG).get("model_type")
    if architecture not in ARCHITECTURES:
        subject = f"{directory / CONFIG} field model_type"
        raise CheckpointError(subject, given=architecture, expected=f"one of {', '.join(ARCHITECTURES)}", fix=_FIX)
    if not (directory / WEIGHTS).is_file() and not (directory / INDEX).is_file():
        raise _broken(directory, "no weights", f"{WEIGHTS} or {INDEX}")
    transformers = transformers_package()
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise _broken(directory, error, "a model that transformers loads") from None
    for name in sorted(loading["missing_keys"]):
        raise _broken(directory, f"no weights {name}", "all weights that follow from config.json")
    for name, weights in model.named_parameters():
        if not torch.isfinite(weights).all():
            raise _broken(directory, f"NaN or Inf in {name}", "finite weights")
    loaded: PreTrainedModel = model.eval()
    return loaded


def save_backbone(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    directory: str | Path,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model with its tokenizer as a directory that transformers loads, too; one at that path is replaced.

    Args:
        further: contents by file name, to write beside it, or in place of a tokenizer's file; a name may have a
            directory.

    Raises:
        CheckpointError: the disk refuses.
    """
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions_of(model),
        "eos_token": tokenizer.tokenizer.id_to_token(tokenizer.end),
    }
    contents = {
        TOKENIZER: tokenizer.tokenizer.to_str(pretty=True).encode(),
        TOKENIZER_CONFIG: json.dumps(special, indent=2).encode(),
        **(further or {}),
    }
    try:
        with replaced_directory(Path(directory)) as new:
            model.save_pretrained(new)
            for name, data in contents.items():
                (new / name).parent.mkdir(exist_ok=True)
                write_durably(new / name, data)
    except OSError as error:
        fix = "Free space, or choose another --out."
        raise CheckpointError(f"{directory}", given=Raw(error), expected="a writable place", fix=fix) from None


def positions_of(model: PreTrainedModel) -> int:
    """Return the most tokens of a text that a model was made for."""
    return int(model.config.max_position_embeddings)


def linear_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the linear layers of a model but the last, which makes the logits."""
    kinds = (nn.Linear, transformers_package().pytorch_utils.Conv1D)
    last = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [module for module in model.modules() if isinstance(module, kinds) and module is not last]


class BaseIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which language model a head is for: the name of its directory, and a SHA-256.

    The hash is over the names and hashes of config.json, tokenizer.json and the weights' files: each of them decides
    what the model's states mean.

    Attributes:
        dequantized_from: the GGUF file that the weights were read from, see :func:`export.generate.gguf.dequantize`.
    """

    name: str
    sha256: str
    dequantized_from: str = ""

    @property
    def described(self) -> str:
        """The model, for people."""
        origin = f", dequantized from {self.dequantized_from}" if self.dequantized_from else ""
        return f"{self.name} with SHA-256 {self.sha256[:12]}…{origin}"


def identity_of(directory: Path) -> BaseIdentity:
    """Return the identity of a Hugging Face directory, whose weights are in one or several files."""
    single = directory / WEIGHTS
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    files += [file for name in (CONFIG, TOKENIZER) if (file := directory / name).is_file()]
    hashes = "".join(f"{file.name} {file_sha256(file)}\n" for file in files)
    origin = _configuration(directory / CONFIG).get("dequantized_from", "")
    return BaseIdentity(directory.resolve().name, hashlib.sha256(hashes.encode()).hexdigest(), str(origin))


class LastStates(nn.Module):
    """From token ids [B, T] to the last hidden states [B, T, E], from which the next tokens are predicted."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: Any = model.base_model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the states."""
        states: Tensor = self.model(ids, use_cache=False).last_hidden_state
        return states


class Base:
    """A frozen language model with its tokenizer.

    Args:
        directory: as :func:`load_backbone` reads it.

    Attributes:
        embeddings: of its tokens, [V, E].
        read_out: from last states to logits.
        tokenizer_files: contents by name, for models that are made from it.

    Raises:
        CheckpointError: a file is missing or malformed.
        UsageError: transformers is not installed, or there is no such device.
    """

    def __init__(self, directory: str | Path, device: DeviceName = "cpu") -> None:
        self.device = device_of(device)
        self.model = load_backbone(directory).requires_grad_(False)
        self.model.to(self.device)  # type: ignore[arg-type]
        self.tokenizer = TextTokenizer.load(directory)
        self.identity = identity_of(Path(directory))
        self.tokenizer_files = tokenizer_files(Path(directory))
        untyped: Any = self.model
        self.embeddings: Tensor = untyped.get_input_embeddings().weight
        self.read_out = read_out_of(untyped)
        #: V, the number of logits, and E, the width of a state.
        self.vocabulary, self.width = self.read_out.weight.shape

    @contextmanager
    def revised(self, module: nn.Module | None) -> Iterator[PreTrainedModel]:
        """Yield the model with its logits changed by a head or a control; it also writes texts so during the block.

        Args:
            module: returns logits [N, V] from logits [N, V] and hidden states [N, E], on the model's device; None
                changes nothing.
        """
        if module is None:
            yield self.model
            return
        untyped: Any = self.model
        last = untyped.get_output_embeddings()
        untyped.set_output_embeddings(_RevisedReadOut(self.read_out, module))
        if self.read_out.softcap is not None:
            untyped.config.final_logit_softcapping = None  # the read-out has done it
        try:
            yield self.model
        finally:
            untyped.set_output_embeddings(last)
            if self.read_out.softcap is not None:
                untyped.config.final_logit_softcapping = self.read_out.softcap


class _RevisedReadOut(nn.Module):
    def __init__(self, read_out: ReadOut, module: nn.Module) -> None:
        super().__init__()
        self._read_out, self.module = read_out, module

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        revised: Tensor = self.module(self._read_out.logits(rows), rows)
        return revised.reshape(*hidden.shape[:-1], -1)


def transformers_package() -> Any:
    """Return the package transformers; a UsageError says that it is not installed."""
    try:
        import transformers
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("transformers", given=Raw(error), expected="an importable package", fix=fix) from None
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # a file takes milliseconds, and a bar of ours is shown beside it
    return transformers


def _configuration(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise _broken(path, error.strerror, "the configuration of a Hugging Face model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken(path, error, "JSON") from None


def _broken(path: Path, given: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}", given=Raw(given), expected=expected, fix=_FIX)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()
