"""Recipe for fine-tuning."""

from __future__ import annotations

from typing import Literal

import msgspec

from export.training import recipe

#: Tokens of a text; longer ones are cut.
MAX_LENGTH = 128


class Distillation(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a teacher: (1 - imitation) * task + imitation * teacher's outputs + hidden * its hidden states.

    Attributes:
        imitation: 0 to 1.
        temperature: of the logits.
        hidden: of the corresponding layers, which must be as wide; 0 ignores them.
    """

    imitation: float = 0.5
    temperature: float = 2.0
    hidden: float = 1.0


class Recipe(recipe.Recipe, frozen=True, kw_only=True):
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
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    distillation: Distillation = Distillation()
    dropout: float = 0.0
    frozen_embeddings: bool = False


#: The best recipe for reduced models on the hold-out of STS-B; export/reduce/LIMITS.md has the others, and CoLA.
RESTORING = Recipe(epochs=8, peak_learning_rate=4e-4, distillation=Distillation(hidden=5.0))
