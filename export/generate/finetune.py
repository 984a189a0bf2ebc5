"""Fine-tuning of a language model: LoRA on all linear layers, as in paper 000, or all weights.

``peft`` is imported here alone.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from edge.errors import Raw, UsageError
from export.generate.files import ADAPTER
from export.generate.model import Base, linear_layers
from export.generate.tokenizer import EncodedExample
from export.generate.train import Corpus, LanguageObjective, train_to_directory
from export.training.objective import SILENT, Observer
from export.training.recipe import Precision, Recipe
from export.training.runs import RunMetrics
from export.training.trainer import Trained, train

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Name of the model in the record.
MODEL = "fine-tuned-language-model"
_RECIPE = Recipe(epochs=1, peak_learning_rate=1e-3, warmup_share=0.05, schedule="cosine", clip_norm=1.0)
BasePrecision = Literal["fp32", "nf4"]
#: The layers that make queries, keys and values, by ``model_type``; GPT-2 has one for all three.
_LAYERS = {"gpt2": ["c_attn"]}
_OTHERS = ["q_proj", "k_proj", "v_proj"]
#: The files of an adapter in peft's format.
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a fine-tuning.

    Attributes:
        rank: of the adapters; None trains all weights.
        base: precision of the frozen weights while the adapters train.
        epochs: passes over the examples; the hold-out chooses one.
        rate: the learning rate after the warm-up.
        precision: of the multiplications in training.
    """

    rank: int | None
    base: BasePrecision = "fp32"
    epochs: int
    rate: float
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if self.rank is None and self.base != "fp32":
            fix = "Leave --full or --base-precision out."
            given = Raw(f"{self.base} with --full")
            raise UsageError("--base-precision", given=given, expected="adapters, or fp32", fix=fix)

    @property
    def recipe(self) -> Recipe:
        """The settings of the training loop."""
        return replace(_RECIPE, epochs=self.epochs, peak_learning_rate=self.rate, precision=self.precision)


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
    files of the tokenizer stay as they are. All else is as in :func:`export.generate.train.train_language`.

    Args:
        seed: of the adapters' initial weights and of the order of examples.

    Raises:
        TrainingError: the loss is no longer a finite number.
        DataError: no example fits.
        UsageError: peft is not installed.
    """
    model = _untrained(base.model, tuning, seed)

    def finish() -> tuple[PreTrainedModel, dict[str, bytes]]:
        if tuning.rank is None:
            return cast("PreTrainedModel", model), base.tokenizer_files
        lora = cast("PeftModel", model)
        with tempfile.TemporaryDirectory() as scratch:
            lora.save_pretrained(scratch, save_embedding_layers=False)
            files = {f"{ADAPTER}/{file}": (Path(scratch) / file).read_bytes() for file in _FILES}
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


def tuned(
    model: PreTrainedModel,
    tuning: Tuning,
    train_on: Sequence[EncodedExample],
    holdout: Sequence[EncodedExample],
    *,
    seed: int,
    state: Path,
    observer: Observer = SILENT,
) -> tuple[Any, Trained]:
    """Fine-tune a copy of a model, and return it, with its adapters apart, if any, and how it was trained.

    Args:
        state: as in :func:`export.training.trainer.train`.
    """
    copied, recipe = _untrained(model, tuning, seed), tuning.recipe
    objective = LanguageObjective(copied, train_on, holdout, recipe, seed=seed)
    return copied, train(objective, recipe, seed=seed, state=state, observer=observer)


def _untrained(model: PreTrainedModel, tuning: Tuning, seed: int) -> nn.Module:
    return unfrozen(model) if tuning.rank is None else adapted(model, tuning, seed)


def unfrozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model, all of whose weights train."""
    return copy.deepcopy(model).requires_grad_(True)


def adapted(model: PreTrainedModel, tuning: Tuning, seed: int) -> PeftModel:
    """Return a copy of a model in the base's precision, with new adapters on all linear layers but the last."""
    assert tuning.rank is not None
    return with_lora(rounded_to_nf4(model) if tuning.base == "nf4" else model, tuning.rank, seed, "linear")


def with_lora(
    model: PreTrainedModel, rank: int, seed: int, layers: Literal["attention", "linear"] = "attention"
) -> PeftModel:
    """Return a copy of a model with adapters of low rank, which alone train.

    The update is B A h, without a factor, after Hu et al. 2021, arXiv 2106.09685.

    Args:
        layers: those with an adapter, the queries, keys and values, or all linear layers but the last.

    Raises:
        UsageError: peft is not installed.
    """
    kind = str(model.config.model_type)
    with _peft() as peft:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=rank,
            target_modules="all-linear" if layers == "linear" else _LAYERS.get(kind, _OTHERS),
            fan_in_fan_out=kind in _LAYERS,
        )
        torch.manual_seed(seed)
        lora: PeftModel = peft.get_peft_model(copy.deepcopy(model), config)
    return lora


def moved(lora: PeftModel, model: PreTrainedModel) -> PeftModel:
    """Return a copy of a model with the adapters of another, which has layers of the same shapes."""
    with _peft() as peft:
        copied: PeftModel = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(lora.peft_config["default"]))
        peft.set_peft_model_state_dict(copied, peft.get_peft_model_state_dict(lora, save_embedding_layers=False))
    return copied.eval()


def merged(lora: PeftModel) -> PreTrainedModel:
    """Return a plain copy of a model whose weights contain its adapters."""
    untyped: Any = copy.deepcopy(lora)
    return cast("PreTrainedModel", untyped.merge_and_unload())


def trainable(model: nn.Module) -> int:
    """Return the number of parameters that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextmanager
def _peft() -> Iterator[Any]:
    """Yield the package, with a generator of torch's own for the block."""
    try:
        import peft
    except ImportError as error:
        fix = "Install it with pip install 'fewheads[language]'."
        raise UsageError("peft", given=Raw(error), expected="an importable package", fix=fix) from None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute of models that transformers renames
        yield peft


#: Consecutive weights that share a scale, their largest magnitude. The scales stay in FP32.
BLOCK = 64


def _nf4_levels() -> Tensor:
    """Return the 16 values of a weight in units of its block's scale, [16], rising.

    They are quantiles of the normal distribution, 7 below and 8 above an exact 0, divided by the largest.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(0.5, outermost, count, dtype=torch.float64)[1:]) for count in (9, 8)
    )
    levels = torch.cat([-below.flip(0), torch.zeros(1), above])
    return (levels / levels.max()).float()


#: 4-bit NormalFloat (NF4) of QLoRA, Dettmers et al. 2023, arXiv 2305.14314.
LEVELS = _nf4_levels()
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


def nearest(weights: Tensor) -> Tensor:
    """Return each weight as the nearest level of its block in FP32; blocks follow one another row by row."""
    flat = weights.float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    units = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    levels = LEVELS.to(flat.device)[torch.bucketize(units, _MIDDLES.to(flat.device))]
    return (levels * scales).flatten()[: len(flat)].view_as(weights)


@torch.no_grad()
def rounded_to_nf4(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose linear layers but the last have rounded weights, in blocks along their inputs.

    Embeddings, biases and norms stay as they are.
    """
    rounded = copy.deepcopy(model)
    for layer in linear_layers(rounded):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        # GPT-2 keeps its matrices transposed.
        weight.copy_(nearest(weight) if isinstance(layer, nn.Linear) else nearest(weight.T.contiguous()).T)
    return rounded
