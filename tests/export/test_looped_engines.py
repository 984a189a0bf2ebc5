"""The graphs of a looped model in TensorRT-RTX: they compile, and attention in FP16 is one kernel at any length.

In FP16, TensorRT-RTX 1.7 fuses the causal attention of a step, with its scale, its mask and the softmax, although the
mask is computed from the number of tokens, which is dynamic. In FP32 it fuses no attention. Both sizes have heads that
may be fused, of 16 and of 32 features.
"""

from functools import partial

import numpy as np
import pytest
import torch

from edge.bundles.manifest import Profile, Tolerance
from edge.runtimes.tensorrt.build import compile_onnx
from export.estimate.model import kernels
from export.estimate.operations import work_of
from export.models.convert import golden_of, largest_difference
from export.papers.looped.functions import draw_prompts
from export.papers.looped.graphs import EMBED_OUTPUTS, STEP_OUTPUTS, Embed, StepGraph, embed_onnx, step_onnx
from export.papers.looped.model import PromptTransformer
from export.papers.looped.recipes import plan_of
from export.papers.looped.tier import usual_steps
from tests.support.marks import with_rtx

pytestmark = with_rtx

ROWS = 8
compiled = partial(compile_onnx, flavor="tensorrt_rtx", compute_capability="SM86", subject="looped")


def model_of(size):
    torch.manual_seed(0)
    return PromptTransformer(plan_of("linear", size).config).eval()


def profile_of(inputs, least):
    return {
        name: Profile(min=(1, *least[name], *array.shape[2:]), opt=array.shape, max=(64, *array.shape[1:]))
        for name, array in inputs.items()
    }


def prompts_of(config):
    xs, ys = draw_prompts("linear", ROWS, config.points, config.dims, torch.Generator().manual_seed(1))
    return {"xs": xs.numpy(), "ys": ys[:, :-1].numpy()}


def test_an_embedding_compiles():
    model = model_of("small")
    inputs = prompts_of(model.config)
    data, golden = embed_onnx(model), golden_of(Embed(model), inputs, EMBED_OUTPUTS)
    assert largest_difference(data, golden, Tolerance(atol=1e-5, rtol=1e-5), "embed") < 1e-5
    product = compiled(data, profile_of(inputs, {"xs": (2,), "ys": (1,)}))
    assert (product.report.attention, product.report.typing) == ("no attention", "strong")


@pytest.mark.parametrize("size", ["small", "paper"])
def test_attention_of_a_step_is_fused_in_fp16_for_prompts_of_any_length(size):
    model = model_of(size)
    with torch.no_grad():
        prompt, state = Embed(model)(*map(torch.from_numpy, prompts_of(model.config).values()))
        for _ in range(4):
            state = model.step(state, prompt)
    inputs = {
        "state": state.numpy(), "prompt": prompt.numpy(), "last": np.full((ROWS, 1), prompt.shape[1] - 1, np.int64)
    }  # fmt: skip
    data, golden = step_onnx(model), golden_of(StepGraph(model), inputs, STEP_OUTPUTS)
    profile = profile_of(inputs, {"state": (3,), "prompt": (3,), "last": (1,)})
    profile["last"] = Profile(min=(1, 1), opt=(ROWS, 1), max=(64, 1))
    for graph, atol, attention in (
        (data, 1e-4, "1 block, not fused: FP32, and fusion needs FP16"),
        (usual_steps(data)[1].data, 0.02, "1 block, fused"),
    ):
        assert largest_difference(graph, golden, Tolerance(atol=atol, rtol=atol), "step") < atol
        product = compiled(graph, profile)
        assert product.report.attention == attention
        assert (b"_gemm_mha_v2" in product.data) == attention.endswith(", fused")
        assert product.report.typing == "strong"
        assert not product.report.notes
    # There were 18: three copied queries, keys and values, and four read the prediction out.
    counted = kernels(graph, profile)
    assert counted is not None
    assert len(counted) <= 11
    work = work_of(graph, {name: array.shape for name, array in inputs.items()}, "step")
    # Its structure, from which manifests are predicted; the engine reads prediction and residual out in two kernels.
    assert len(work.kernels) + work.others == len(counted) - 1
