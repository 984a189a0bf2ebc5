"""Networks of timm and torchvision, exported by both exporters of torch, as bundles in all precisions."""

import json

import numpy as np
import onnxruntime
import pytest
import torch

from edge.bundles.bundle import Bundle
from edge.runtimes.build import load_runner
from export.bundle.pack.golden import largest_rms
from export.cli.pack import pack
from tests.support.task_data import invoke

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the exporters warn


def export(model, images, path, *, dynamo, outputs):
    """Write a network with a dynamic batch where its example has more than one image."""
    options = {"input_names": ["images"], "output_names": outputs, "external_data": False}
    if len(images) > 1:
        axes = {0: torch.export.Dim("batch")} if dynamo else {0: "batch"}
        options |= {"dynamic_shapes": (axes,)} if dynamo else {"dynamic_axes": {"images": axes, outputs[0]: axes}}
    torch.onnx.export(model.eval(), (images,), path, dynamo=dynamo, opset_version=18, **options)


def errors_of_tier(bundle, path, images, tier):
    """Return the RMS error of each output of a tier against ONNX Runtime alone, relative to its spread."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    runner = load_runner(bundle, "onnxruntime", bundle.path / "cache", tier=tier).runner
    try:
        got = runner.infer({"images": images})
    finally:
        runner.close()
    wanted = dict(zip(got, session.run(list(got), {"images": images}), strict=True))
    return [np.sqrt(np.square(got[name] - want).mean()) / (want.std() or 1) for name, want in wanted.items()]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_networks_of_timm(name, dynamo, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    export(timm.create_model(name), torch.randn(2, 3, 224, 224), path, dynamo=dynamo, outputs=["logits"])
    options = ("--name", "timm", "--repository", tmp_path, "--fp16", "--int8", "--max-batch-size", 4, "--json")
    bundle = Bundle.open(json.loads(invoke(pack, path, *options))["bundle"])
    images = np.random.default_rng(1).normal(size=(2, 3, 224, 224)).astype(np.float32)
    assert max(errors_of_tier(bundle, path, images, "x1")) < 1e-5
    assert 1e-5 < max(errors_of_tier(bundle, path, images, "x1-int8")) < largest_rms("int8")


def test_a_detector_of_torchvision_has_its_suppression_inside(tmp_path):
    detection = pytest.importorskip("torchvision").models.detection
    torch.manual_seed(0)
    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, score_thresh=0.0)
    path, images = tmp_path / "model.onnx", np.random.default_rng(0).random((1, 3, 320, 320), np.float32)
    export(model, torch.from_numpy(images), path, dynamo=False, outputs=["boxes", "scores", "labels"])
    np.savez(tmp_path / "real.npz", images=images)
    options = ("--name", "ssd", "--repository", tmp_path, "--inputs", tmp_path / "real.npz", "--json")
    written = json.loads(invoke(pack, path, *options))
    assert "NonMaxSuppression" in written["only_onnxruntime"]
    others = np.random.default_rng(1).random((1, 3, 320, 320), np.float32)
    assert max(errors_of_tier(Bundle.open(written["bundle"]), path, others, "x1")) < 1e-5
