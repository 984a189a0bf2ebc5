from dataclasses import replace

import numpy as np
import pytest
import torch

from export.attention import MultiHeadAttention
from export.experiments.attention.baselines import (
    BLOCK,
    RATIO,
    LinformerAttention,
    SparseAttention,
    like,
    sparse_pattern,
)
from export.experiments.attention.reductions import attention_plan, pruned_by_gradient
from export.tasks.predictions import predict
from tests.support.reduction_data import inputs, model

DIM, HEADS, WIDTH, POSITIONS = 16, 2, 8, 32


@pytest.fixture
def dense():
    torch.manual_seed(0)
    return MultiHeadAttention(DIM, HEADS, WIDTH).eval()


def tokens(length, seed=0):
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(seed))


def test_linformer_attends_to_means_of_four(dense):
    linformer = like(LinformerAttention(DIM, HEADS, WIDTH, POSITIONS), dense)
    x = tokens(8)
    means = x.unflatten(1, (-1, RATIO)).mean(dim=2)  # linear, so the mean of keys is the key of the mean
    projections = (dense.q_proj, x), (dense.k_proj, means), (dense.v_proj, means)
    q, k, v = (projection(y).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for projection, y in projections)
    heads = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(dim=-1) @ v
    wanted = dense.output_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(linformer(x)[0], wanted)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 13, POSITIONS])
def test_linformer_takes_any_length_and_ignores_padding(dense, length):
    linformer = like(LinformerAttention(DIM, HEADS, WIDTH, POSITIONS), dense)
    x = tokens(POSITIONS)
    mask = (torch.arange(POSITIONS) < length).long().expand(2, -1)
    padded = linformer(x, mask)[0][:, :length]
    torch.testing.assert_close(padded, linformer(x[:, :length], mask[:, :length])[0])
    assert linformer.context(x[:, :length], None)[0].shape == (2, HEADS, -(-length // RATIO), WIDTH)


def test_linformer_trains_its_projections(dense):
    linformer = like(LinformerAttention(DIM, HEADS, WIDTH, POSITIONS), dense).train()
    linformer(tokens(8), torch.ones(2, 8))[0].square().sum().backward()
    for rows in (linformer.key_rows, linformer.value_rows):
        assert rows.grad[:2, :8].abs().sum() > 0
        assert rows.grad[2:].abs().sum() == rows.grad[:, 8:].abs().sum() == 0


def test_bigbird_is_dense_while_all_blocks_are_neighbours(dense):
    sparse = like(SparseAttention(DIM, HEADS, WIDTH, POSITIONS, seed=0), dense)
    short, long = tokens(2 * BLOCK), tokens(POSITIONS)
    assert torch.equal(sparse(short)[0], dense(short)[0])
    assert not torch.allclose(sparse(long)[0], dense(long)[0])
    assert set(sparse.state_dict()) == set(dense.state_dict())


def test_bigbird_hides_what_the_pattern_leaves_out(dense):
    sparse = like(SparseAttention(DIM, HEADS, WIDTH, POSITIONS, seed=0), dense)
    pattern = sparse_pattern(POSITIONS, seed=0)
    x = tokens(POSITIONS)
    row = POSITIONS - 1
    hidden = pattern[row] == 0
    assert hidden.any()
    changed = torch.where(hidden[:, None], x + 5, x)
    torch.testing.assert_close(sparse(changed)[0][:, row], sparse(x)[0][:, row])


def test_the_pattern_is_window_global_and_random():
    pattern = sparse_pattern(64, seed=1)
    blocks = pattern[::BLOCK, ::BLOCK]
    assert (pattern.repeat_interleave(1, 0).unflatten(0, (-1, BLOCK)).std(dim=1) == 0).all()
    assert (blocks[0] == 1).all()
    assert (blocks[:, 0] == 1).all()
    assert all(blocks.diagonal(offset).eq(1).all() for offset in (-1, 0, 1))
    assert 3 <= blocks[5:-1].sum(dim=1).min() <= blocks[5:-1].sum(dim=1).max() <= 5
    assert not torch.equal(pattern, sparse_pattern(64, seed=2))
    assert torch.equal(pattern, sparse_pattern(64, seed=1))


def test_gradient_pruning_with_all_heads_changes_nothing(shared):
    whole = pruned_by_gradient(replace(shared, share=1.0))
    rows = inputs(seed=3)
    np.testing.assert_allclose(predict(whole.model, rows).logits, predict(shared.dense, rows).logits, atol=1e-4)
    assert np.mean(whole.kept) == 1


def test_gradient_pruning_takes_the_heads_that_count_least(shared):
    """Heads whose output goes nowhere have no gradient, and go first."""
    useless = model(heads=4, head_dim=16, ffn_dim=64)
    with torch.no_grad():
        for layer in useless.transformer.layers:
            layer.attention.output_proj.weight[:, 16:48] = 0  # heads 1 and 2
    pruned = pruned_by_gradient(replace(shared, dense=useless))
    assert pruned.kept == ((1, 0, 0, 1), (1, 0, 0, 1))
    rows = inputs(seed=3)
    np.testing.assert_allclose(predict(pruned.model, rows).logits, predict(useless, rows).logits, atol=1e-4)


def test_a_layer_may_lose_all_its_heads(shared):
    useless = model(heads=4, head_dim=16, ffn_dim=64)
    with torch.no_grad():
        useless.transformer.layers[0].attention.output_proj.weight.mul_(1e-6)
    pruned = pruned_by_gradient(replace(shared, dense=useless, share=1 / 8))
    assert sum(map(sum, pruned.kept)) == 1
    assert None in [layer.attention for layer in pruned.model.transformer.layers]
    assert np.isfinite(predict(pruned.model, inputs()).logits).all()


def test_the_attention_plan_answers_more_alike_than_pruning(shared):
    rows = inputs(seed=3)
    wanted = predict(shared.dense, rows).logits
    ours, theirs = (
        np.square(predict(make(shared).model, rows).logits - wanted).mean()
        for make in (attention_plan, pruned_by_gradient)
    )
    assert ours < theirs
