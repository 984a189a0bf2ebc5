"""Fine-tuning of a language model: LoRA on all linear layers, as in paper 000, or all weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec
from msgspec.structs import replace
from torch import nn

from edge.errors import Raw, UsageError
from export.generate.base import Base
from export.generate.files import ADAPTER
from export.generate.finetuned import adapter_files, merged, moved, trainable, unfrozen, with_lora
from export.generate.nf4 import rounded_to_nf4
from export.generate.train import Corpus, train_to_directory
from export.training.objective import SILENT, Observer
from export.training.recipe import Recipe
from export.training.runs import RunMetrics

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Name of the model in the record.
MODEL = "fine-tuned-language-model"
_RECIPE = Recipe(epochs=1, peak_learning_rate=1e-3, warmup_share=0.05, schedule="cosine", clip_norm=1.0)
BasePrecision = Literal["fp32", "nf4"]


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a fine-tuning.

    Attributes:
        rank: of the adapters; None trains all weights.
        base: precision of the frozen weights while the adapters train.
        epochs: passes over the examples; the hold-out chooses one.
        rate: the learning rate after the warm-up.
    """

    rank: int | None
    base: BasePrecision = "fp32"
    epochs: int
    rate: float

    def __post_init__(self) -> None:
        if self.rank is None and self.base != "fp32":
            fix = "Leave --full or --base-precision out."
            given = Raw(f"{self.base} with --full")
            raise UsageError("--base-precision", given=given, expected="adapters, or fp32", fix=fix)

    @property
    def recipe(self) -> Recipe:
        """The settings of the training loop."""
        return replace(_RECIPE, epochs=self.epochs, peak_learning_rate=self.rate)


def adapted(model: PreTrainedModel, tuning: Tuning, seed: int) -> PeftModel:
    """Return a copy of a model in the base's precision, with new adapters on all linear layers but the last."""
    assert tuning.rank is not None
    return with_lora(rounded_to_nf4(model) if tuning.base == "nf4" else model, tuning.rank, seed, "linear")


def finetune(
    name: str,
    base: Base,
    corpus: Corpus,
    tuning: Tuning,
    directory: str | Path,
    *,
    seed: int,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Fine-tune a copy of a model, measure it on the hold-out, and write a directory that is a base itself.

    Adapters are merged into the FP32 base, whatever base they were trained on, and also written in peft's format. The
    files of the tokenizer stay as they are.
    Everything else is as in :func:`export.generate.train.train_language`.

    Args:
        seed: of the adapters' initial weights and of the order of examples.

    Raises:
        TrainingError: the loss is no longer a finite number.
        DataError: no example fits.
        UsageError: peft is not installed.
    """
    model: nn.Module = unfrozen(base.model) if tuning.rank is None else adapted(base.model, tuning, seed)

    def finish() -> tuple[PreTrainedModel, dict[str, bytes]]:
        if tuning.rank is None:
            return cast("PreTrainedModel", model), base.tokenizer_files
        lora = cast("PeftModel", model)
        files = {f"{ADAPTER}/{file}": data for file, data in adapter_files(lora).items()}
        return merged(moved(lora, base.model)), base.tokenizer_files | files

    return train_to_directory(
        model,
        corpus,
        base.tokenizer,
        tuning.recipe,
        directory,
        seed=seed,
        kind=MODEL,
        arguments={
            "name": name,
            "base": msgspec.to_builtins(base.identity),
            "tuning": msgspec.to_builtins(tuning),
            "trained_parameters": trainable(model),
        },
        tensorboard=tensorboard,
        observer=observer,
        finish=finish,
    )
