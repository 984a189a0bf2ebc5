"""A frozen language model as its heads see it: last states, read-out, embeddings, and an identity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor, nn

from export.generate.backbone import load_backbone
from export.generate.files import WEIGHTS, tokenizer_files
from export.generate.read_out import ReadOut, read_out_of
from export.generate.tokenizer import TextTokenizer
from export.training.device import DeviceName, device_of
from export.training.runs import CONFIG, TOKENIZER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_BYTES = 2**20


class BaseIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which language model a head is for: the name of its directory, and a SHA-256.

    The hash is over the names and hashes of config.json, tokenizer.json and the weights' files: each of them decides
    what the model's states mean.
    """

    name: str
    sha256: str


class LastStates(nn.Module):
    """From token ids [B, T] to the last hidden states [B, T, E]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: Any = model.base_model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the states from which the next tokens are predicted."""
        states: Tensor = self.model(ids, use_cache=False).last_hidden_state
        return states


class Base:
    """A frozen language model with its tokenizer.

    Args:
        directory: as :func:`export.generate.backbone.load_backbone` reads it.

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

    @property
    def vocabulary(self) -> int:
        """V, the number of logits."""
        return len(self.read_out.weight)

    @property
    def width(self) -> int:
        """E, of a state."""
        return self.read_out.weight.shape[1]

    @contextmanager
    def revised(self, module: nn.Module | None) -> Iterator[PreTrainedModel]:
        """Return the model with its logits changed by a head or a control, which also writes texts, during the block.

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


def identity_of(directory: Path) -> BaseIdentity:
    """Return the identity of a Hugging Face directory, whose weights are in one or several files."""
    single = directory / WEIGHTS
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    files += [file for name in (CONFIG, TOKENIZER) if (file := directory / name).is_file()]
    hashes = "".join(f"{file.name} {_sha256(file)}\n" for file in files)
    return BaseIdentity(directory.resolve().name, hashlib.sha256(hashes.encode()).hexdigest())


class _RevisedReadOut(nn.Module):
    def __init__(self, read_out: ReadOut, module: nn.Module) -> None:
        super().__init__()
        self._read_out, self.module = read_out, module

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        revised: Tensor = self.module(self._read_out.logits(rows), rows)
        return revised.reshape(*hidden.shape[:-1], -1)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()
