"""Model cards of bundles and runs, read by Hugging Face's library."""

import pytest
from msgspec.structs import replace

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Measure, MeasuredLatency, PredictedLatency, Provenance
from export.bundle.exportable import Contents, write_contents
from export.report.card import bundle_card, run_card
from export.training.runs import CARD, RunConfig, RunMetrics
from tests.support import text_model, text_pair_model

hub = pytest.importorskip("huggingface_hub")
ORIGIN = Provenance(created="2026-11-27", trainer="a test", data="texts", versions={"torch": "2.13.0"})


def test_the_card_of_a_bundle_says_what_the_manifest_says(tmp_path):
    size = {"device": "a board", "runtime": "tensorrt", "precision": "fp16", "rows": 1, "tokens": 32}
    latencies = (
        MeasuredLatency(**size | {"device": "a processor"}, milliseconds=2.5, times_faster=1.0, calls=9),
        PredictedLatency(**size, milliseconds=1.25, times_faster=2.0, power_mode="15W", low_ms=1, high_ms=2),
    )
    manifest = text_model.manifest()
    first, *others = manifest.tiers
    measures = (Measure(metric="accuracy", split="dev", value=0.75, n=40, interval=(0.6, 0.9)),)
    manifest = replace(manifest, tiers=(replace(first, latencies=latencies), *others), measures=measures)
    write_contents(Contents(manifest, text_model.files(), predicted="never"), tmp_path / "sentiment-1")
    written = Bundle.open(tmp_path / "sentiment-1").read(CARD).decode()
    assert written == bundle_card(manifest)
    card = hub.ModelCard(written)
    assert (card.data.library_name, card.data.pipeline_tag) == ("fewheads", "text-classification")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.75, "dev")
    assert manifest.description in card.text
    assert "| accuracy | dev | 0.75 (0.60 … 0.90) | 40 | 1 |" in card.text
    assert "| full | prediction | a board at 15W | tensorrt | fp16 | 1 | 32 | 1.25 | 1 | 2 | 2 |" in card.text
    assert "| full | measured | a processor | tensorrt | fp16 | 1 | 32 | 2.5 |  |  | 1 |" in card.text


def test_tasks_have_the_names_of_the_hub():
    assert hub.ModelCard(bundle_card(text_pair_model.manifest())).data.pipeline_tag == "text-ranking"
    vit, bert = {"architecture": "vit"}, {"architecture": "bert"}
    for arguments, tag in (
        ({"transformer": bert, "embedding": {"normalize": True}}, "feature-extraction"),
        ({"transformer": bert, "labels": []}, "question-answering"),
        ({"task": "SST-2", "transformer": bert, "labels": ["negative", "positive"]}, "text-classification"),
        ({"task": "STS-B", "transformer": bert, "labels": ["score"]}, "text-classification"),
        ({"transformer": bert, "labels": ["score"], "pair": True}, "text-ranking"),
        ({"transformer": bert, "labels": ["O", "B-PER"], "per_token": True}, "token-classification"),
        ({"task": "digits", "transformer": vit, "labels": ["0", "1"]}, "image-classification"),
        ({"function": "linear"}, None),
    ):
        config = RunConfig("encoder", arguments, ORIGIN)
        measures = (Measure(metric="f1", split="holdout", value=0.5, n=4),)
        card = hub.ModelCard(run_card("one", config, RunMetrics(1234, 1, 1, 1.0, measures)))
        assert card.data.pipeline_tag == tag
        assert card.data.eval_results[0].metric_value == 0.5
        assert "encoder with 1,234 parameters" in card.text
        assert "torch 2.13.0" in card.text
