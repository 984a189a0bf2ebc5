"""Training of heads of backward attention, and of the controls that they have to beat, on cached hidden states.

A state takes 2 E bytes, where its logits would take 4 V: for GPT-2 1.5 KB and 201 KB. Only states that predict a token
with a loss are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.tokens import sorted_batches
from export.errors import CheckpointError, DataError
from export.generate.evaluate import completion_limit, evaluate, padded
from export.generate.finetune import trainable
from export.generate.model import Base, BaseIdentity, LastStates, ReadOut, positions_of
from export.generate.tokenizer import EncodedExample
from export.generate.train import Corpus
from export.papers.backward.head import BackwardHead, HeadConfig, create
from export.training.checkpoint import fingerprint, load, save
from export.training.device import model_device
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import RunConfig, RunMetrics, read_config
from export.training.trainer import train

#: Names of the models in the record.
MODEL, BIAS = "backward-head", "vocabulary-bias"
#: For heads and controls alike.
RECIPE = Recipe(epochs=1, peak_learning_rate=1e-2, batch_size=256, warmup_share=0.05, schedule="cosine", clip_norm=1.0)

#: Returns the states [B, T, E] from which the next tokens of token ids [B, T], int64, are predicted.
Backbone = Callable[[Tensor], Tensor]


class Temperature(nn.Module):
    """z / τ: one parameter. Each control starts as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]."""
        return logits / self.log_temperature.exp()


class VocabularyBias(nn.Module):
    """z + b: V parameters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]."""
        return logits + self.bias


#: What has a run of its own, and bundles.
Head: TypeAlias = BackwardHead | VocabularyBias


class LowRankAdapter(nn.Module):
    """z + B A h for the last hidden state h [E], with A [d, E] and B [V, d]: d (V + E) parameters.

    As in LoRA (Hu et al. 2021, arXiv 2106.09685), A is random and B is 0 at the start.
    """

    def __init__(self, vocabulary: int, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(vocabulary, rank))

    @staticmethod
    def rank_for(parameters: int, vocabulary: int, width: int) -> int:
        """Return the rank d of at least 1 whose number of parameters is closest to a given one."""
        return max(1, round(parameters / (vocabulary + width)))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V] and h [N, E]."""
        return torch.addmm(logits, hidden @ self.down.T, self.up.T)


class HiddenStates(NamedTuple):
    """States and what they predict: FP16 [P, E], and int32 [P]."""

    hidden: Array
    targets: Array


@torch.no_grad()
def hidden_states(backbone: Backbone, sequences: Sequence[EncodedExample], batch_size: int = 8) -> HiddenStates:
    """Return the states before the tokens with a loss; they are in a temporary file, not in memory.

    Args:
        backbone: causal, in evaluation mode.
        batch_size: sequences that are computed together, of about equal length.

    Raises:
        DataError: a state is too large for FP16.
        UsageError: no token has a loss.
    """
    positions = sum(int(row.learnt[1:].sum()) for row in sequences)  # nothing predicts a first token
    if not positions:
        given, fix = Raw(f"{len(sequences)} sequences without any"), "Give examples with solutions."
        raise UsageError("tokens with a loss", given=given, expected="at least one", fix=fix)
    device = model_device(backbone) if isinstance(backbone, nn.Module) else torch.device("cpu")
    stored: Array | None = None
    targets, end = np.empty(positions, np.int32), 0
    for rows in sorted_batches(np.array([len(row.ids) for row in sequences]), batch_size):
        batch = padded([sequences[row] for row in rows], device)
        following = batch.learnt[:, 1:]
        hidden = backbone(batch.ids)[:, :-1][following]
        states = hidden.half()
        if not states.isfinite().all():
            expected = f"at most {np.finfo(np.float16).max:.0f}, the largest FP16"
            fix = "Use a language model with a normalisation before its last layer."
            raise DataError("hidden states", given=float(hidden.abs().max()), expected=expected, fix=fix)
        if stored is None:
            with TemporaryFile() as file:
                stored = np.memmap(file, np.float16, "w+", shape=(positions, states.shape[1]))
        start, end = end, end + len(states)
        stored[start:end], targets[start:end] = states.cpu().numpy(), batch.ids[:, 1:][following].cpu().numpy()
    assert stored is not None
    return HiddenStates(stored, targets)


class HiddenBatch(NamedTuple):
    """Hidden states [N, E], FP32, and the tokens that follow, [N], int64."""

    hidden: Tensor
    targets: Tensor


class HeadObjective:
    """An :class:`export.training.objective.Objective`: the cross-entropy of the tokens with a loss.

    All is computed in FP32: the logits of trained models are so large that half of their digits would be lost in BF16.
    The cross-entropy is of what the model returns, so that of a literal head is the paper's.

    Args:
        model: returns logits [N, V] from logits [N, V] and hidden states [N, E].
        read_out: of the language model; it is moved to the model's device.
        states: to train on; an epoch has each of them once.
        holdout: states that choose the best epoch.
        seed: of the order of the states.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(
        self,
        model: nn.Module,
        read_out: ReadOut,
        states: HiddenStates,
        holdout: HiddenStates,
        *,
        seed: int,
        batch_size: int = RECIPE.batch_size,
    ) -> None:
        self.model = model
        self.steps_per_epoch = -(-len(states.targets) // batch_size)
        self._read_out = read_out._replace(weight=read_out.weight.detach().float().to(model_device(model)))
        self._states, self._holdout = states, holdout
        self._seed, self._batch_size = seed, batch_size

    def fingerprint(self) -> str:
        """Return a hash of the initial weights, the frozen ones, the states and all settings."""
        settings = f"{type(self.model).__name__} {self._read_out.softcap} {self._seed} {self._batch_size}"
        frozen = [tensor.cpu().numpy() for tensor in (self._read_out.weight, *self.model.buffers())]
        return fingerprint([self.model], [*frozen, *self._states, *self._holdout], settings)

    def batches(self, epoch: int, first: int) -> Iterator[HiddenBatch]:
        """Yield the states in an order that depends on the seed and the epoch alone."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._states.targets))
        yield from self._batches(self._states, order[first * self._batch_size :])

    def loss(self, batch: HiddenBatch, progress: float) -> Tensor:
        """Return the mean cross-entropy."""
        return self._losses(batch).mean()

    def evaluate(self) -> EpochScore:
        """Return the negated mean cross-entropy on the hold-out."""
        error = float(self.losses(self._holdout).mean())
        return EpochScore(-error, "cross-entropy", error)

    @torch.no_grad()
    def losses(self, states: HiddenStates) -> Array:
        """Return the cross-entropy of each token, FP64 [P]."""
        batches = self._batches(states, np.arange(len(states.targets)))
        return np.concatenate([self._losses(batch).double().cpu().numpy() for batch in batches])

    def _losses(self, batch: HiddenBatch) -> Tensor:
        with torch.no_grad():
            logits = self._read_out.logits(batch.hidden)
        return functional.cross_entropy(self.model(logits, batch.hidden), batch.targets, reduction="none")

    def _batches(self, states: HiddenStates, rows: Array) -> Iterator[HiddenBatch]:
        device = self._read_out.weight.device
        for start in range(0, len(rows), self._batch_size):
            some = np.sort(rows[start : start + self._batch_size])  # as they are on the disk
            hidden, targets = states.hidden[some].astype(np.float32), states.targets[some].astype(np.int64)
            yield HiddenBatch(torch.from_numpy(hidden).to(device), torch.from_numpy(targets).to(device))


def new_head(base: Base, seed: int, **shape: Any) -> BackwardHead:
    """Return a head with random weights on a model's device.

    Args:
        shape: fields of :class:`export.papers.backward.head.HeadConfig`, without those that follow from the model.
    """
    config = HeadConfig(vocabulary=base.vocabulary, width=base.width, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BackwardHead(config, base.embeddings).to(base.device)


def new_bias(base: Base) -> VocabularyBias:
    """Return a bias of zeros on a model's device."""
    return VocabularyBias(base.vocabulary).to(base.device)


def train_head(
    head: Head,
    base: Base,
    corpus: Corpus,
    directory: str | Path,
    *,
    seed: int,
    steps: int,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a head or a bias, measure it on the hold-out, and write its run directory.

    The metrics are those of :func:`export.generate.evaluate.evaluate`, of the model with the head. The state of an
    unfinished run is kept beside the directory; the same call resumes from it.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the order of the states.
        steps: rounded up to whole passes over the states.

    Raises:
        TrainingError: the loss is no longer a finite number.
        DataError: no example fits into the model.
    """
    directory = Path(directory)
    train_rows, holdout, data = corpus.encoded(base.tokenizer, positions_of(base.model))
    states = [hidden_states(LastStates(base.model), rows) for rows in (train_rows, holdout)]
    objective = HeadObjective(head, base.read_out, *states, seed=seed)
    recipe = replace(RECIPE, epochs=-(-steps // objective.steps_per_epoch))
    files = RunFiles(directory, tensorboard)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    with base.revised(head) as model:
        limit = completion_limit(train_rows)
        measures = evaluate(model, base.tokenizer, "holdout", corpus.holdout, max_tokens=limit)
    metrics = trained.metrics(trainable(head), measures)
    record = provenance(trainer=f"{trained.steps} steps, {recipe}", data=data, seed=seed)
    name, arguments = BIAS, {"base": msgspec.to_builtins(base.identity)}
    if isinstance(head, BackwardHead):
        name, arguments["config"] = MODEL, msgspec.to_builtins(head.config)
    config = RunConfig(name, arguments, record, precision="fp32", processor=processor())
    save(directory, head, config, metrics, files.finished())
    files.remove()
    return metrics


def load_head(directory: str | Path, base: Base) -> Head:
    """Read a head or a bias of a language model from a run directory, in evaluation mode on the model's device.

    Raises:
        CheckpointError: the directory is no whole run of either, or one of another language model.
    """
    models: dict[str, Callable[..., Head]] = {
        MODEL: partial(create, base.embeddings),
        BIAS: lambda **arguments: new_bias(base),
    }
    config = read_config(directory)
    if config.model in models:
        try:
            recorded = msgspec.convert(config.arguments.get("base"), BaseIdentity)
        except msgspec.ValidationError as error:
            raise _foreign(directory, error, "the identity of its language model") from None
        if recorded.sha256 != base.identity.sha256:
            given, expected = (f"a head of {one.described}" for one in (recorded, base.identity))
            raise _foreign(directory, given, expected)
    head, _, _ = load(directory, models)
    return head.to(base.device)


def _foreign(directory: str | Path, given: object, expected: str) -> CheckpointError:
    fix = "Give the head's own language model, or train a head for this one."
    return CheckpointError(f"head {directory}", given=Raw(given), expected=expected, fix=fix)
