"""Recipe for fine-tuning."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from export.finetune import is_imported
from export.training.recipe import Recipe, Schedule
from export.training.runs import OwnData, RunConfig

#: Tokens of a text; longer ones are cut.
MAX_LENGTH = 128


class Distillation(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a teacher: (1 - imitation) * task + imitation * teacher's outputs + hidden * its hidden states.

    Attributes:
        imitation: 0 to 1.
        temperature: of the logits.
        hidden: of the corresponding layers, which must be as wide; 0 ignores them.
        transfer_share: of the rows of each batch that are from unlabelled text, if there is any; above 0 and below 1.
    """

    imitation: float = 0.5
    temperature: float = 2.0
    hidden: float = 1.0
    transfer_share: float = 0.5


class FinetuningRecipe(Recipe, frozen=True, kw_only=True):
    """Settings of a fine-tuning.

    The peak learning rate is for models of MiniLM's size; export/reduce/LIMITS.md compares some. For BERT's size,
    Devlin et al. 2019, "BERT", appendix A.3, have 2e-5 to 5e-5. Epochs, batch, warm-up and decay are theirs.

    Attributes:
        distillation: unused without a teacher.
        dropout: of the embeddings, and of each sub-layer's output.
        frozen_embeddings: keeps the embeddings as they are. In MiniLM they are half of the parameters, and their update
            takes a quarter of a step on short texts.
    """

    epochs: int = 3
    peak_learning_rate: float = 1e-4
    warmup_share: float = 0.1
    schedule: Schedule = "linear"
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    distillation: Distillation = Distillation()
    dropout: float = 0.0
    frozen_embeddings: bool = False


#: The best recipe for reduced models on the hold-out of STS-B; export/reduce/LIMITS.md has the others, and CoLA.
RESTORING = FinetuningRecipe(epochs=8, peak_learning_rate=4e-4, distillation=Distillation(hidden=5.0))


def restoring_command(config: RunConfig, data_dir: Path, *, model: Path, teacher: Path) -> str:
    """Return the ``fewheads finetune`` that distils a reduced run from its original, by the recipe that restored most.

    Args:
        config: of the original.
        data_dir: what :func:`export.finetune.needed_data` found.
        model: the reduced run, beside which the new one is to be.
    """
    if config.own_data:
        data = _own_data(config.own_data.located(data_dir))
    elif is_imported(config):
        data = ["--data", str(data_dir)]
    else:
        data = [config.arguments["task"], "--data-dir", str(data_dir)]
    length = config.arguments.get("max_length", MAX_LENGTH)
    if length != MAX_LENGTH and not is_imported(config):
        data += ["--max-length", str(length)]
    recipe = ["--epochs", str(RESTORING.epochs), "--lr", str(RESTORING.peak_learning_rate)]
    recipe += ["--hidden", f"{RESTORING.distillation.hidden:g}"]
    place = ["--name", f"{model.name}-taught", "--out", str(model.parent)]
    return shlex.join(
        ["fewheads", "finetune", *data, "--model", str(model), "--teacher", str(teacher), *recipe, *place]
    )


def _own_data(data: OwnData) -> list[str]:
    """Return the options that read own data as they were read."""
    options = ["--data", data.path, *(["--dev", data.dev] if data.dev else [])]
    if data.images or data.spans:
        return options
    for name in data.texts:
        options += ["--text", name]
    options += ["--label", data.label]
    if not data.labels:
        return [*options, "--regression"]
    if any("," in name for name in data.labels):  # so they were not given, but are those of the data
        return [*options, "--classification"]
    return [*options, "--labels", ",".join(data.labels)]
