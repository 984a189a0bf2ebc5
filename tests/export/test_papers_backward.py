"""The head of backward attention, also folded, and the training of heads and controls."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from edge.errors import UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.data.tokens import sorted_batches
from export.errors import DataError
from export.generate.model import ReadOut
from export.generate.tokenizer import EncodedExample
from export.models.convert import to_onnx
from export.papers.backward.bundle import FoldedHead, fold
from export.papers.backward.chunks import ChunkMemory, ChunkRecord, ChunkSettings, chunked_losses
from export.papers.backward.head import BackwardHead, HeadConfig, create
from export.papers.backward.training import HeadObjective, LowRankAdapter, Temperature, VocabularyBias, hidden_states
from export.papers.experiment import compute_parts, read_records
from export.training.provenance import processor
from export.training.recipe import Recipe
from export.training.trainer import train

FORMS = {"single": {}, "heads": {"heads": 3}, "layers": {"layers": 2, "heads": 2}}
FORMS |= {"latent": {"latent": 4}, "divided": {"divided": True, "layers": 2}}
UNFOLDED = {"alone": {"form": "alone", "layers": 2}, "top 5": {"top_k": 5, "heads": 2}}
VOCABULARY, WIDTH = 40, 8
HEAD = HeadConfig(vocabulary=VOCABULARY, width=WIDTH, dims=6, heads=2)
RECIPE = Recipe(epochs=4, peak_learning_rate=0.03, batch_size=64)


def make_head(vocabulary=23, width=12, dims=6, moved=True, **options):
    """Return a head as after some training, or as at its start."""
    torch.manual_seed(0)
    config = HeadConfig(vocabulary=vocabulary, width=width, dims=dims, **options)
    head = BackwardHead(config, torch.randn(vocabulary, width) + 1)
    if moved:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter += 0.5 * torch.randn_like(parameter)
    return head


def plain(head, logits):
    """Return z' by the equations of the module, one head and one operation after the other."""
    for layer in head.layers:
        X = layer.gain * head.embeddings / head.embeddings.square().mean(dim=1, keepdim=True).sqrt()
        X = X if layer.latent is None else X @ layer.latent
        heads = head.config.heads
        K, U = ((X @ W).chunk(heads, dim=1) for W in (layer.key, layer.value))
        temperatures = [1.0] if layer.log_temperature is None else layer.log_temperature.exp()
        kept = logits >= logits.topk(head.config.top_k or 23).values[..., -1:]
        weights = [kept * torch.exp(logits / t) for t in temperatures]
        means = [p / p.sum(dim=-1, keepdim=True) @ u for p, u in zip(weights, U, strict=True)]
        means = [mean / 23 if head.config.divided else mean for mean in means]
        queries = (torch.cat(means, dim=-1) @ layer.query).chunk(heads, dim=-1)
        scores = sum(q @ k.T for q, k in zip(queries, K, strict=True)) / math.sqrt(head.config.dims // heads)
        logits = layer.alpha * scores + (0 if head.config.form == "alone" else logits)
    return logits


@pytest.mark.parametrize("form", [*FORMS, *UNFOLDED])
def test_a_head_computes_its_equations_and_their_gradients(form):
    logits, weights = 3 * torch.randn(2, 5, 23), torch.randn(2, 5, 23)
    found = []
    for compute in (lambda head, start: head(start), plain):
        head, start = make_head(**(FORMS | UNFOLDED)[form]), logits.clone().requires_grad_()
        output = compute(head, start)
        (weights * output).sum().backward()
        found.append([output.detach(), start.grad, *(parameter.grad for parameter in head.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_training_keeps_nothing_of_the_size_of_the_logits_but_them():
    head, logits = make_head(vocabulary=4096, width=8, dims=4, heads=2), torch.randn(128, 4096)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head(logits)
    kept.pop(logits.untyped_storage().data_ptr(), None)
    assert 0 < sum(kept.values()) < logits.nbytes


def test_a_new_head_is_the_model_and_only_alpha_learns_at_first():
    head, logits = make_head(moved=False, heads=2, layers=2), torch.randn(4, 23)
    output = head(logits)
    assert torch.equal(output, logits)
    functional.cross_entropy(output, torch.arange(4)).backward()
    learning = {name for name, parameter in head.named_parameters() if parameter.grad.abs().max() > 0}
    assert learning == {"layers.0.alpha", "layers.1.alpha"}


def test_scores_of_a_new_head_have_about_unit_variance():
    head, logits = make_head(500, 64, 32, moved=False), 100 * torch.eye(500)
    head.layers[0].alpha.data.fill_(1)
    assert (head(logits) - logits).std().item() == pytest.approx(1, rel=0.3)


def test_parameters_are_those_of_the_paper_and_alpha():
    def count(**options):
        return BackwardHead(HeadConfig(vocabulary=2, width=768, **options), torch.zeros(2, 768)).parameter_count

    # g, W_K and W_V, W_Q; in the literal form there is no α.
    assert (count(dims=64, form="literal"), count(dims=128, form="literal")) == (103_168, 213_760)
    assert count(dims=64) == 103_168 + 1
    assert count(dims=64, heads=4, layers=2) == 2 * (103_168 + 1 + 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 30, "heads": 24}, "heads of a backward head: got 24, expected a divisor of the 30 dims"),
        ({"dims": 30, "heads": 0}, "heads of a backward head: got 0, expected at least 1"),
        ({"dims": 30, "heads": 2, "form": "literal"}, "form literal of a backward head: got 2 heads and 1 layers"),
        ({"dims": 30, "latent": 0}, "latent of a backward head: got 0, expected at least 1"),
        ({"dims": 30, "top_k": -1}, "top_k of a backward head: got -1, expected at least 0"),
        ({"dims": 30, "dropout": 1.0}, "dropout of a backward head: got 1.0, expected a share from 0 to below 1"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        HeadConfig(vocabulary=100, width=64, **options)


@pytest.mark.parametrize(("form", "datatype"), [("residual", torch.bfloat16), ("literal", torch.float64)])
def test_logits_of_any_precision_are_computed_in_fp32(form, datatype):
    head, logits = make_head(form=form), torch.randn(2, 3, 23).to(datatype)
    found = head(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, head(logits.float()))


@pytest.mark.parametrize("vocabulary", [23, 50_257])
def test_the_literal_loss_is_bounded(vocabulary):
    lower, upper = math.log((math.e + vocabulary - 1) / math.e), math.log(math.e + vocabulary - 1)
    if vocabulary == 50_257:
        assert (round(lower, 3), round(upper, 3)) == (9.825, 10.825)
    head = make_head(vocabulary=vocabulary, width=4, dims=2, form="literal")
    logits = 5 * torch.randn(16, vocabulary)
    for size in (1, 1e4):  # flat, and a corner of the simplex
        head.layers[0].query.data *= size
        output = head(logits)
        torch.testing.assert_close(output.sum(dim=1), torch.ones(16))
        right, wrong = output.argmax(dim=1), output.argmin(dim=1)
        losses = [functional.cross_entropy(output, targets, reduction="none") for targets in (right, wrong)]
        assert all(((lower - 1e-4 < loss) & (loss < upper + 1e-4)).all() for loss in losses)
    assert losses[0].min().item() == pytest.approx(lower, abs=1e-3)
    assert losses[1].max().item() == pytest.approx(upper, abs=1e-3)


def test_the_literal_form_weighs_values_with_logits_and_divides_by_the_vocabulary():
    head, logits = make_head(form="literal"), torch.randn(3, 23)
    (K, U), W_Q = head.keys_and_values()[0], head.layers[0].query
    mean = torch.stack([(row[:, None] * U).sum(dim=0) / 23 for row in logits])
    torch.testing.assert_close(head(logits), torch.softmax(mean @ W_Q @ K.T / math.sqrt(6), dim=1))


def run_folded(head, logits, compute, alpha=1.0):
    z = logits.numpy()
    for folded in fold(head):
        inputs = {**folded._asdict(), "alpha": np.full((len(z), 1), alpha, np.float32)}
        z = compute({"logits": z, **inputs})
    return z


def in_torch(inputs):
    with torch.no_grad():
        return FoldedHead()(*(torch.from_numpy(array) for array in inputs.values())).numpy()


@pytest.fixture(scope="module")
def in_onnxruntime():
    """The graph on ONNX Runtime; positions, vocabulary, groups and width of groups are chosen by the inputs."""
    shapes = {
        "logits": {0: "positions", 1: "vocabulary"},
        "keys": {0: "groups", 1: "dims", 2: "vocabulary"},
        "values": {0: "groups", 1: "vocabulary", 2: "dims"},
        "temperatures": {0: "groups"},
        "alpha": {0: "positions"},
    }
    sizes = {"positions": 3, "vocabulary": 11, "groups": 2, "dims": 5}
    examples = {name: torch.ones([sizes[one] for one in named.values()]) for name, named in shapes.items()}
    examples["alpha"] = torch.ones(3, 1)
    runner = OnnxRuntimeRunner(to_onnx(FoldedHead(), examples, ["adjusted"], shapes), subject="head")
    yield lambda inputs: runner.run(inputs)["adjusted"]
    runner.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_folded_head_equals_the_head_in_torch_and_onnx_runtime(form, in_onnxruntime):
    head, logits = make_head(**FORMS[form]), 3 * torch.randn(7, 23)
    logits[1, :5] = -math.inf
    expected = head(logits).detach().numpy()
    assert np.abs(expected[0] - logits[0].numpy()).max() > 0.1
    for compute in (in_torch, in_onnxruntime):
        np.testing.assert_allclose(run_folded(head, logits, compute), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(run_folded(head, logits, compute, alpha=0.0), logits.numpy())
    if head.config.layers == 1:  # α scales what the head adds
        doubled, once = (
            of[2:] - logits.numpy()[2:] for of in (run_folded(head, logits, in_torch, alpha=2.0), expected)
        )
        np.testing.assert_allclose(doubled, 2 * once, rtol=1e-3, atol=1e-4)


def test_a_folded_bias_is_added_to_the_logits(in_onnxruntime):
    bias, logits = VocabularyBias(23), 3 * torch.randn(7, 23)
    torch.nn.init.normal_(bias.bias)
    logits[1, :5] = -math.inf
    found = run_folded(bias, logits, in_onnxruntime, alpha=2.0)
    np.testing.assert_allclose(found, (logits + 2 * bias.bias).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("form", "top_k"), [("literal", 0), ("alone", 0), ("residual", 5)])
def test_what_is_no_sum_of_logits_and_a_map_of_probabilities_is_not_folded(form, top_k):
    message = f"form of a backward head: got {form}, top_k {top_k}, expected residual, top_k 0"
    with pytest.raises(UsageError, match=message):
        fold(make_head(form=form, top_k=top_k))


def test_dropout_is_of_probabilities_and_in_training_alone():
    head, logits = make_head(dropout=0.5), 3 * torch.randn(400, 23)
    expected = make_head()(logits)
    assert torch.equal(head.eval()(logits), expected)
    found = torch.stack([head.train()(logits) for _ in range(400)])
    assert found.std(dim=0).min() > 0.01
    torch.testing.assert_close(found.mean(dim=0), expected, atol=0.5, rtol=0.1)


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_chunks_changes_no_cross_entropy_and_no_gradient(form):
    torch.manual_seed(1)
    read_out, start = ReadOut(torch.randn(23, 12), 20.0), torch.randn(7, 12)
    targets, weights = torch.arange(7) * 3, torch.randn(7)
    found = []
    for chunk in (0, 5, 23):
        head, hidden = make_head(**FORMS[form]), start.clone().requires_grad_()
        if chunk:
            losses = chunked_losses(head, read_out, hidden, targets, chunk)
        else:
            losses = functional.cross_entropy(head(read_out.logits(hidden)), targets, reduction="none")
        (weights * losses).sum().backward()
        found.append([losses.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())])
    for whole, *chunked in zip(*found, strict=True):
        for one in chunked:
            torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-4)


class Backbone(nn.Module):
    """A causal model that is too unsure: each state is the mean of the embeddings of two tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.table.weight.data *= 0.6

    def forward(self, ids):
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
        found.append(EncodedExample(ids.numpy().astype(np.int32), np.arange(length) >= 2))
    return found


@pytest.fixture(scope="module")
def backbone():
    return Backbone()


@pytest.fixture(scope="module")
def sequences(backbone):
    return sequences_of(backbone, 200, seed=0)


@pytest.fixture(scope="module")
def cached(backbone, sequences):
    """Hidden states to train on and to choose with."""
    holdout = sequences_of(backbone, 60, seed=1)
    unlearnt = EncodedExample(np.zeros(20, np.int32), np.arange(20) == 0)  # nothing predicts a first token
    return [hidden_states(backbone, some, batch_size=4) for some in ([*sequences, *4 * [unlearnt]], holdout)]


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


def test_unusable_states_are_refused(backbone, sequences):
    with pytest.raises(DataError, match=r"hidden states: got \d+\.\d+, expected at most 65504, the largest FP16"):
        hidden_states(lambda ids: 1e5 * backbone(ids), sequences[:10])
    unlearnt = [row._replace(learnt=np.arange(len(row.ids)) == 0) for row in sequences]
    with pytest.raises(UsageError, match="tokens with a loss: got 200 sequences without any, expected at least one"):
        hidden_states(backbone, unlearnt)


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


def test_batches_and_fingerprints_depend_on_all_that_a_training_does(backbone, cached):
    def first(seed, epoch):
        return next(HeadObjective(Temperature(), readout, *cached, seed=seed).batches(epoch, 0)).targets.tolist()

    readout = ReadOut(backbone.table.weight)
    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))}) == 3
    whole, rest = (list(make_objective("head", backbone, cached).batches(0, first)) for first in (0, 2))
    assert [batch.targets.tolist() for batch in whole[2:]] == [batch.targets.tolist() for batch in rest]
    head = make_model("head", backbone)
    other = create(backbone.table.weight + 1, config={"vocabulary": VOCABULARY, "width": WIDTH, "dims": 6, "heads": 2})
    other.load_state_dict(head.state_dict())
    variants = [(head, readout, *cached), (other, readout, *cached), (head, ReadOut(readout.weight, 9.0), *cached)]
    variants += [(head, ReadOut(readout.weight + 1), *cached), (head, readout, *cached[::-1])]
    variants += [(head, readout, cached[0], cached[0])]
    assert len({HeadObjective(*arguments, seed=0).fingerprint() for arguments in variants}) == 6


def test_a_step_in_chunks_takes_less_memory(tmp_path):
    settings = ChunkSettings(
        vocabulary=20_000, width=8, dims=4, states=512, chunks=(0, 1000), repeats=1, processor=processor()
    )
    compute_parts(ChunkMemory(settings), tmp_path, as_jobs=True, jobs=1)
    whole, chunked = (read_records(tmp_path, ChunkRecord)[f"chunk{chunk}-0"] for chunk in settings.chunks)
    logits_bytes = 4 * settings.states * settings.vocabulary
    assert whole.peak_bytes > 2 * logits_bytes
    assert chunked.peak_bytes < logits_bytes
