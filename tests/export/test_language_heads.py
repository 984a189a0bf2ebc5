"""Cached hidden states, and the training of heads and their controls on them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from edge.errors import UsageError
from export.data.tokens import sorted_batches
from export.errors import CheckpointError, DataError
from export.generate.read_out import ReadOut
from export.generate.tokenizer import Encoded
from export.papers.backward.head import BackwardHead, HeadConfig, create
from export.papers.backward.training import (
    HIDDEN,
    TARGETS,
    HeadObjective,
    LowRankAdapter,
    Temperature,
    VocabularyBias,
    cached_hidden,
)
from export.training.checkpoint import load, save
from export.training.provenance import provenance
from export.training.recipe import Recipe
from export.training.runs import RunConfig, RunMetrics
from export.training.trainer import train

VOCABULARY, WIDTH = 40, 8
HEAD = HeadConfig(vocabulary=VOCABULARY, width=WIDTH, dims=6, heads=2, chunk_bytes=4096)
RECIPE = Recipe(epochs=4, peak_learning_rate=0.03, batch_size=64)


class Backbone(nn.Module):
    """A causal model that is too unsure: each state is the mean of the embeddings of two tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.table.weight.data *= 0.6
        self.calls = []

    def forward(self, ids):
        self.calls.append(tuple(ids.shape))
        embedded = self.table(ids)
        before = functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        return (embedded + before) / 2


def sequences_of(backbone, number, seed):
    """Draw sequences of 5 to 14 tokens; the truth has the model's logits three times, and some tokens are rare."""
    generator = torch.Generator().manual_seed(seed)
    weight = backbone.table.weight.detach()
    bias = torch.linspace(-1.5, 1.5, VOCABULARY)
    found = []
    for length in torch.randint(5, 15, (number,), generator=generator).tolist():
        ids = torch.randint(VOCABULARY, (1,), generator=generator)
        while len(ids) < length:
            logits = 3 * backbone(ids[None])[0, -1].detach() @ weight.T + bias
            ids = torch.cat([ids, torch.multinomial(logits.softmax(0), 1, generator=generator)])
        found.append(Encoded(ids.numpy().astype(np.int32), np.arange(length) >= 2))
    backbone.calls.clear()
    return found


@pytest.fixture(scope="module")
def backbone():
    return Backbone()


@pytest.fixture(scope="module")
def sequences(backbone):
    return sequences_of(backbone, 200, seed=0)


@pytest.fixture(scope="module")
def cached(backbone, sequences, tmp_path_factory):
    """Hidden states to train on and to choose with."""
    root = tmp_path_factory.mktemp("hidden")
    holdout = sequences_of(backbone, 60, seed=1)
    unlearnt = Encoded(np.zeros(20, np.int32), np.arange(20) == 0)  # nothing predicts a first token
    return [
        cached_hidden(root / name, backbone, some, name="toy", batch_size=4)
        for name, some in (("train", [*sequences, *4 * [unlearnt]]), ("holdout", holdout))
    ]


def make_model(kind, backbone):
    torch.manual_seed(0)
    if kind == "head":
        return BackwardHead(HEAD, backbone.table.weight)
    parameters = BackwardHead(HEAD, backbone.table.weight).parameter_count
    rank = LowRankAdapter.rank_for(parameters, VOCABULARY, WIDTH)
    return {
        "temperature": Temperature,
        "bias": partial(VocabularyBias, VOCABULARY),
        "adapter": partial(LowRankAdapter, VOCABULARY, WIDTH, rank),
    }[kind]()


def make_objective(kind, backbone, cached, **options):
    return HeadObjective(
        make_model(kind, backbone), ReadOut(backbone.table.weight), *cached, seed=0, batch_size=64, **options
    )


def test_states_are_those_before_each_token_with_a_loss(backbone, sequences, cached):
    states = cached[0]
    assert states.hidden.dtype == np.float16
    assert isinstance(states.hidden, np.memmap)
    assert len(states.targets) == sum(len(one.ids) - 2 for one in sequences)
    lengths = np.array([len(one.ids) for one in sequences])
    rows = [sequences[place].ids for batch in sorted_batches(lengths, 4) for place in batch]
    np.testing.assert_array_equal(states.targets, np.concatenate([ids[2:] for ids in rows]))
    alone = [backbone(torch.from_numpy(ids[None].astype(np.int64)))[0, 1:-1].detach() for ids in rows]  # no padding
    np.testing.assert_allclose(states.hidden, np.concatenate(alone), rtol=1e-3, atol=1e-3)


def test_states_are_computed_once_for_a_model_and_its_sequences(backbone, sequences, tmp_path):
    compute = partial(cached_hidden, tmp_path / "states", backbone, batch_size=4)
    backbone.calls.clear()
    first = compute(sequences[:10], name="toy")
    assert [rows for rows, _ in backbone.calls] == [4, 4, 2]
    assert [tokens for _, tokens in backbone.calls] == sorted((one[1] for one in backbone.calls), reverse=True)
    again = compute(sequences[:10], name="toy")
    assert len(backbone.calls) == 3
    np.testing.assert_array_equal(first.hidden, again.hidden)
    fingerprints = {first.fingerprint, again.fingerprint}
    fingerprints |= {compute(sequences[:9], name="toy").fingerprint, compute(sequences[:9], name="other").fingerprint}
    assert (len(fingerprints), len(backbone.calls)) == (3, 9)


def test_a_run_that_computes_others_meanwhile_leaves_the_states_of_each(backbone, sequences, tmp_path):
    def first(some):
        return cached_hidden(tmp_path, backbone, some, name="toy")

    def beside_another(ids):
        if not backbone.calls:
            first(sequences[10:20])
        return backbone(ids)

    backbone.calls.clear()
    mine = cached_hidden(tmp_path, beside_another, sequences[:10], name="toy")
    computed = len(backbone.calls)
    for states, some in ((mine, sequences[:10]), (first(sequences[10:20]), sequences[10:20])):
        assert sorted(states.targets) == sorted(np.concatenate([one.ids[2:] for one in some]))
    assert len(backbone.calls) == computed  # neither has replaced the other


def test_a_failure_leaves_the_earlier_states(backbone, sequences, tmp_path):
    path = tmp_path / "states"
    cached_hidden(path, backbone, sequences[:10], name="toy")

    def huge(ids):
        return 1e5 * backbone(ids)

    with pytest.raises(DataError, match=r"hidden states: got \d+\.\d+, expected at most 65504, the largest FP16"):
        cached_hidden(path, huge, sequences[:10], name="huge")
    backbone.calls.clear()
    cached_hidden(path, backbone, sequences[:10], name="toy")
    assert not backbone.calls
    assert len(list(path.iterdir())) == 1


def test_unusable_states_are_refused(backbone, sequences, tmp_path):
    path = tmp_path / "states"
    own = path / cached_hidden(path, backbone, sequences, name="toy").fingerprint
    whole = (own / HIDDEN).read_bytes()
    (own / HIDDEN).write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"states in .*: got .* expected whole files\. Delete the directory"):
        cached_hidden(path, backbone, sequences, name="toy")
    (own / HIDDEN).write_bytes(whole)
    np.save(own / TARGETS, np.zeros(3, np.int32))
    with pytest.raises(DataError, match="got files of different lengths, expected whole files"):
        cached_hidden(path, backbone, sequences, name="toy")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"got \[Errno \d+\] .*, expected a writable place"):
        cached_hidden(tmp_path / "file" / "states", backbone, sequences, name="toy")
    unlearnt = [one._replace(learnt=np.arange(len(one.ids)) == 0) for one in sequences]
    with pytest.raises(UsageError, match="tokens with a loss: got 200 sequences without any, expected at least one"):
        cached_hidden(tmp_path / "none", backbone, unlearnt, name="toy")


@pytest.mark.parametrize("kind", ["head", "temperature", "bias", "adapter"])
def test_a_module_starts_as_the_model_and_learns(kind, backbone, cached):
    objective = make_objective(kind, backbone, cached)
    holdout = cached[1]
    logits = torch.from_numpy(holdout.hidden.astype(np.float32)) @ backbone.table.weight.detach().T
    base = functional.cross_entropy(logits, torch.from_numpy(holdout.targets).long(), reduction="none").numpy()
    np.testing.assert_allclose(objective.losses(holdout), base, rtol=1e-6)
    assert -objective.evaluate().value == pytest.approx(base.mean(), rel=1e-6)
    trained = train(objective, RECIPE, seed=0)
    assert -max(trained.scores) < base.mean() - 0.1
    assert objective.evaluate().value == max(trained.scores)


def test_gpt2_has_no_adapter_that_is_as_small_as_a_head_of_rank_28():
    assert LowRankAdapter.rank_for(24_625, 50_257, 768) == 1


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_an_interrupted_training_ends_with_the_same_bits(kind, backbone, cached, tmp_path):
    class Interrupted(HeadObjective):
        steps = 0

        def loss(self, batch, progress):
            self.steps += 1
            if self.steps == 40:
                raise KeyboardInterrupt
            return super().loss(batch, progress)

    whole = make_objective(kind, backbone, cached)
    assert 2 < whole.steps_per_epoch == -(-len(cached[0].targets) // 64) < 38
    expected = train(whole, RECIPE, seed=0)
    stopped = Interrupted(make_model(kind, backbone), ReadOut(backbone.table.weight), *cached, seed=0, batch_size=64)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, RECIPE, seed=0, state=tmp_path / "state", save_every=2)
    resumed = make_objective(kind, backbone, cached)
    steps = []
    resumed_loss = resumed.loss
    resumed.loss = lambda *arguments: steps.append(1) or resumed_loss(*arguments)
    found = train(resumed, RECIPE, seed=0, state=tmp_path / "state", save_every=2)
    assert len(steps) == expected.steps - 38
    assert (found.scores, found.losses) == (expected.scores, expected.losses)
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    softcapped = HeadObjective(make_model(kind, backbone), ReadOut(backbone.table.weight, 9.0), *cached, seed=0)
    with pytest.raises(CheckpointError, match="got the state of a run with other weights, data or settings"):
        train(softcapped, RECIPE, seed=0, state=tmp_path / "state")


def test_batches_and_fingerprints_depend_on_all_that_a_training_does(backbone, cached):
    def first(seed, epoch):
        return next(HeadObjective(Temperature(), readout, *cached, seed=seed).batches(epoch, 0)).targets.tolist()

    readout = ReadOut(backbone.table.weight)
    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))}) == 3
    torch.manual_seed(0)
    head = BackwardHead(HEAD, backbone.table.weight)
    other = create(backbone.table.weight + 1, config={"vocabulary": VOCABULARY, "width": WIDTH, "dims": 6, "heads": 2})
    other.load_state_dict(head.state_dict())
    variants = [(head, readout, *cached), (other, readout, *cached), (head, ReadOut(readout.weight, 9.0), *cached)]
    variants += [(head, ReadOut(readout.weight + 1), *cached), (head, readout, *cached[::-1])]
    variants += [(head, readout, cached[0], cached[0])]
    assert len({HeadObjective(*arguments, seed=0).fingerprint() for arguments in variants}) == 6


def test_a_literal_head_is_trained_with_the_bounded_loss_of_the_paper(backbone, cached):
    config = HeadConfig(vocabulary=VOCABULARY, width=WIDTH, dims=6, form="literal")
    torch.manual_seed(0)
    objective = HeadObjective(
        BackwardHead(config, backbone.table.weight), ReadOut(backbone.table.weight), *cached, seed=0, batch_size=64
    )
    losses = train(objective, RECIPE, seed=0).losses
    assert np.log((np.e + VOCABULARY - 1) / np.e) < losses[-1] < losses[0] < np.log(np.e + VOCABULARY - 1)


def test_a_head_is_saved_without_the_embeddings_of_its_model(backbone, tmp_path):
    head = make_model("head", backbone)
    with torch.no_grad():
        head.layers[0].alpha.fill_(0.7)
    record = provenance(trainer="none", data="none", seed=0)
    arguments = {"config": {"vocabulary": VOCABULARY, "width": WIDTH, "dims": 6, "heads": 2, "chunk_bytes": 4096}}
    metrics = RunMetrics(head.parameter_count, 0, 0, 0.0, ())
    save(tmp_path / "run", head, RunConfig("backward-head", arguments, record), metrics)
    found, _, _ = load(tmp_path / "run", {"backward-head": partial(create, backbone.table.weight)})
    logits = torch.randn(3, VOCABULARY)
    assert found.config == HEAD
    assert torch.equal(found(logits), head(logits))
    assert (tmp_path / "run" / "weights.safetensors").stat().st_size < 4 * head.parameter_count + 2000
    arguments["config"]["dims"] = "six"
    save(tmp_path / "run", head, RunConfig("backward-head", arguments, record), metrics)
    with pytest.raises(CheckpointError, match="field arguments: got Expected `int`, got `str`"):
        load(tmp_path / "run", {"backward-head": partial(create, backbone.table.weight)})
