"""The backward-attention head: chunks, forms, sizes, and its folded form in torch and ONNX Runtime."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from edge.errors import UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.models.convert import to_onnx
from export.papers.backward.bundle import FoldedHead, fold
from export.papers.backward.head import BackwardHead, HeadConfig, weighted_means

FORMS = {
    "single": {},
    "heads": {"heads": 3},
    "latent": {"latent": 9},
    "gated": {"latent": 9, "gated": True},
    "layers": {"layers": 2, "heads": 2},
}


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
        L = X if layer.latent is None else X @ layer.latent
        if layer.gate is not None:
            L = L * functional.silu(X @ layer.gate)
        heads = head.config.heads
        K, U = ((L @ W).chunk(heads, dim=1) for W in (layer.key, layer.value))
        temperatures = [1.0] if layer.log_temperature is None else layer.log_temperature.exp()
        means = [torch.softmax(logits / t, dim=-1) @ u for t, u in zip(temperatures, U, strict=True)]
        queries = (torch.cat(means, dim=-1) @ layer.query).chunk(heads, dim=-1)
        scores = sum(q @ k.T for q, k in zip(queries, K, strict=True)) / math.sqrt(head.config.dims // heads)
        logits = logits + layer.alpha * scores
    return logits


@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_its_equations_in_any_chunks_and_so_do_its_gradients(form):
    logits, weights = 3 * torch.randn(2, 5, 23), torch.randn(2, 5, 23)
    logits[0, 0, :20] = -math.inf  # the first chunks have no token at all
    weights[0, 0, :20] = 0
    found = {}
    for chunk_bytes in (1, 700, 2**26, None):  # one token, some with a smaller last chunk, all; without chunks
        head = make_head(**FORMS[form], **({"chunk_bytes": chunk_bytes} if chunk_bytes else {}))
        # Operations of torch have the gradient 0 × inf at a logit of -inf.
        start = (logits.clone() if chunk_bytes else logits.clamp(min=-1e9)).requires_grad_()
        output = (head(start) if chunk_bytes else plain(head, start)).clamp(min=-1e9)
        (weights * output).sum().backward()
        found[chunk_bytes] = [output.detach(), start.grad, *(parameter.grad for parameter in head.parameters())]
    expected = found.pop(None)
    for tensors in found.values():
        for one, other in zip(tensors, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -2.5, 80.0, 1e4, -1e4, 3e30, -3e30, -math.inf]), min_size=7, max_size=7),
        min_size=1,
        max_size=3,
    ).filter(lambda rows: all(max(row) > -math.inf for row in rows)),
    temperatures=st.lists(st.floats(0.2, 5), min_size=1, max_size=2),
    chunk_bytes=st.integers(1, 1200),
)
def test_means_are_those_of_a_softmax_for_all_chunks_and_logits(logits, temperatures, chunk_bytes):
    torch.manual_seed(0)
    numbers = (logits, temperatures, torch.randn(len(temperatures), 7, 2).tolist())
    inputs = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in numbers]
    finite = [inputs[0].detach().clamp(min=-1e300).requires_grad_(), *inputs[1:]]  # for gradients without 0 × inf
    expected = torch.softmax(finite[0] / finite[1][:, None, None], dim=2) @ finite[2]
    found = weighted_means(*inputs, chunk_bytes)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((of * weights).sum(), to) for of, to in ((found, inputs), (expected, finite)))
    size = max([1.0, *(abs(one) for row in logits for one in row if math.isfinite(one))])
    for one, other, atol in zip(*gradients, (1e-9, 1e-12 * size, 1e-9), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=atol)


class Allocations(TorchDispatchMode):
    """Records the sizes in bytes of all memory that operations allocate."""

    def __init__(self, known):
        super().__init__()
        self.sizes, self._seen = [], list(known)
        self._pointers = {pointer_of(tensor) for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and pointer_of(tensor) not in self._pointers:
                self._pointers.add(pointer_of(tensor))
                self._seen.append(tensor)  # so that its memory is not used again
                self.sizes.append(tensor.untyped_storage().nbytes())
        return out


def pointer_of(tensor):
    return tensor.untyped_storage().data_ptr()


def test_training_allocates_nothing_of_the_size_of_the_logits_but_the_result():
    budget, of_embeddings = 2**17, 4096 * 8 * 4  # keys, values and their gradients are half of the latter
    head = make_head(vocabulary=4096, width=8, dims=4, heads=2, chunk_bytes=budget)
    logits = torch.randn(128, 4096)
    kept, known = {}, [logits, *head.parameters(), *head.buffers()]

    def pack(tensor):
        kept[pointer_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with Allocations(known) as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = head(logits)
    gradient = torch.randn_like(output)
    with Allocations([*known, output, gradient]) as backward:
        output.backward(gradient)
    assert [size for size in forward.sizes if size > of_embeddings] == [logits.nbytes]
    assert max(backward.sizes) <= of_embeddings
    saved = sum(size for pointer, size in kept.items() if pointer not in {pointer_of(one) for one in known})
    assert 0 < saved < 6 * of_embeddings < logits.nbytes


def test_a_new_head_is_the_model_and_only_alpha_learns_at_first():
    head, logits = make_head(moved=False, heads=2, layers=2), torch.randn(4, 23)
    output = head(logits)
    assert torch.equal(output, logits)
    functional.cross_entropy(output, torch.arange(4)).backward()
    learning = {name for name, parameter in head.named_parameters() if parameter.grad.abs().max() > 0}
    assert learning == {"layers.0.alpha", "layers.1.alpha"}


@pytest.mark.parametrize("options", [{}, {"latent": 32}])
def test_scores_of_a_new_head_have_about_unit_variance(options):
    head, logits = make_head(500, 64, 32, moved=False, **options), 100 * torch.eye(500)
    head.layers[0].alpha.data.fill_(1)
    assert (head(logits) - logits).std().item() == pytest.approx(1, rel=0.3)


def test_parameters_are_those_of_the_specification_and_alpha():
    embeddings = torch.zeros(2, 768)

    def count(**options):
        return BackwardHead(HeadConfig(vocabulary=2, width=768, **options), embeddings).parameter_count

    def terms(d, r):  # g, W_L, W_K and W_V, W_Q
        return 768 + 768 * r + 2 * r * d + d * d

    # Without a latent projection W_K and W_V are 768 × d. In the literal form there is no α.
    assert (count(dims=64, form="literal"), count(dims=128, form="literal")) == (103_168, 213_760)
    assert count(dims=64) == 103_168 + 1
    # The paper's code has d = 30 and a latent of 28, which limits the rank to 28: refused. A head of that rank:
    assert terms(30, 28) == 24_852
    assert count(dims=28, latent=28) == terms(28, 28) + 1 == 24_625
    assert count(dims=28, latent=28, gated=True, heads=4, layers=2) == 2 * (24_625 + 768 * 28 + 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 30, "latent": 28}, "latent of a backward head: got 28, expected at least the 30 dims"),
        ({"dims": 30, "heads": 24}, "heads of a backward head: got 24, expected a divisor of the 30 dims"),
        ({"dims": 30, "gated": True}, "gated of a backward head: got True, expected a latent to gate"),
        ({"dims": 30, "heads": 0}, "heads of a backward head: got 0, expected at least 1"),
        ({"dims": 30, "heads": 2, "form": "literal"}, "form literal of a backward head: got 2 heads and 1 layers"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        HeadConfig(vocabulary=100, width=64, **options)


def test_embeddings_of_another_model_are_refused():
    with pytest.raises(UsageError, match=r"embeddings of a backward head: got the shape \[9, 4\], expected \[9, 8\]"):
        BackwardHead(HeadConfig(vocabulary=9, width=8, dims=2), torch.zeros(9, 4))


@pytest.mark.parametrize("form", ["residual", "literal"])
@pytest.mark.parametrize("datatype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_precision_are_computed_in_fp32(form, datatype):
    head, logits = make_head(form=form), torch.randn(2, 3, 23).to(datatype)
    found = head(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, head(logits.float()))


@pytest.mark.parametrize("shape", [(4, 24), (23, 2), ()])
def test_logits_of_another_vocabulary_are_refused(shape):
    with pytest.raises(UsageError, match=r"logits of a backward head: got the shape .*, expected \[\.\.\., 23\]"):
        make_head()(torch.zeros(shape))


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
    groups = [len(folded.temperatures) for folded in fold(head)]
    assert groups == [head.config.heads] * head.config.layers  # all temperatures differ
    for compute in (in_torch, in_onnxruntime):
        np.testing.assert_allclose(run_folded(head, logits, compute), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(run_folded(head, logits, compute, alpha=0.0), logits.numpy())


def test_heads_of_equal_temperature_are_one_group():
    head, logits = make_head(heads=3), torch.randn(7, 23)
    head.layers[0].log_temperature.data = torch.tensor([0.3, -0.2, 0.3])
    (folded,) = fold(head)
    assert (folded.keys.shape, folded.values.shape) == ((2, 4, 23), (2, 23, 4))  # two dims of the other are zeros
    np.testing.assert_allclose(folded.temperatures, np.exp([-0.2, 0.3]), rtol=1e-6)
    found = run_folded(head, logits, in_torch)
    np.testing.assert_allclose(found, head(logits).detach(), rtol=1e-4, atol=1e-4)
    doubled = run_folded(head, logits, in_torch, alpha=2.0)  # α scales what the head adds
    np.testing.assert_allclose(doubled - logits.numpy(), 2 * (found - logits.numpy()), rtol=1e-3, atol=1e-4)


def test_the_literal_form_has_no_folded_one():
    with pytest.raises(UsageError, match="form of a backward head: got 'literal', expected residual"):
        fold(make_head(form="literal"))
