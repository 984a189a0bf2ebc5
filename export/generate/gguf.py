"""Language models of GGUF files, whose weights have a few bits each, as Hugging Face directories in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from edge.errors import Raw, UsageError
from export.errors import CheckpointError
from export.generate.files import tokenizer_files
from export.generate.model import ARCHITECTURES, file_sha256, save_backbone, transformers_package
from export.generate.tokenizer import TextTokenizer


def dequantize(file: Path, directory: Path) -> str:
    """Write the model of a GGUF file as a directory that ``fewheads language`` takes; return what its weights were.

    The same stands in the field ``dequantized_from`` of its config.json, which all models that are made from it keep:
    the weights are not those that its authors published.

    Raises:
        UsageError: the package gguf is not installed.
        CheckpointError: transformers cannot read the file, weights are missing, the architecture is another one, or the
            disk refuses.
    """
    transformers = transformers_package()
    try:
        from gguf import GGUFReader
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("gguf", given=Raw(error), expected="an importable package", fix=fix) from None
    # Releases without such a setting always dequantize.
    options = {"quantization_config": of(dequantize=True)} if (of := getattr(transformers, "GgufConfig", None)) else {}
    with _refused(file):
        kinds = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        if model.config.model_type not in ARCHITECTURES:
            raise ValueError(f"a model of type {model.config.model_type}")
        for name in sorted(loading["missing_keys"]):
            raise ValueError(f"no weights {name}")  # transformers draws them
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    origin = f"{file.name} with {', '.join(sorted(kinds))}, SHA-256 {file_sha256(file)[:12]}…"
    model.hf_quantizer = None  # transformers refuses to write what it read from a GGUF otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dequantized_from = origin
    with TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        model.config.save_pretrained(scratch)  # the end of a text
        files = tokenizer_files(Path(scratch))
        save_backbone(model, TextTokenizer.load(scratch), directory, files)
    return origin


@contextmanager
def _refused(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError) as error:
        fix = f"Give a file of a model of {', '.join(ARCHITECTURES)}, as llama.cpp writes it."
        raise CheckpointError(f"{file}", given=Raw(error), expected="a GGUF that transformers reads", fix=fix) from None
