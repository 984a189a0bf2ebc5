import json

import pytest
from click.testing import CliRunner

from export import processor
from export.processor import Processor, described, features_of
from export.runs import read_config
from export.tasks.cli import finetune

HASWELL = "processor : 0\nmodel name : Xeon E5\nflags : fpu sse4_2 fma avx avx2 bmi2\n"
SAPPHIRE_RAPIDS = "processor : 0\nflags\t\t: avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n"
GRAVITON_3 = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (HASWELL, ("AVX2",)),
        (SAPPHIRE_RAPIDS, ("AVX2", "AVX-512", "VNNI", "BF16", "AMX")),
        (GRAVITON_3, ("I8MM", "BF16")),
        ("flags : fpu sse2\n", ()),
        ("processor : 0\nbogus flags\n", None),
    ],
)
def test_features_are_read_from_the_flags(cpuinfo, features):
    assert features_of(cpuinfo) == features


def test_processors_are_named_with_their_features():
    a = Processor("A", ("AVX2", "VNNI"))
    assert described([a, None, Processor("B", ()), a, Processor("C")]) == (
        "A (AVX2, VNNI)",
        "B (none)",
        "C (not recorded)",
        "not recorded",
    )


@pytest.mark.parametrize(
    ("cpuinfo", "used", "warning"),
    [
        (HASWELL, "fp32", "--precision: got bf16, expected a processor with BF16 instructions; this one has: AVX2."),
        (SAPPHIRE_RAPIDS, "bf16", None),
        ("", "bf16", None),  # unknown features: the precision stays as given
    ],
)
def test_bf16_needs_a_processor_that_has_it(sst2, tmp_path, monkeypatch, cpuinfo, used, warning):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    options = ("--data-dir", sst2, "--out", tmp_path, "--epochs", 1, "--limit", 16, "--precision", "bf16")
    command = ["SST-2", "--model", sst2 / "model", *options]
    done = CliRunner().invoke(finetune, list(map(str, command)), catch_exceptions=False)
    assert done.exit_code == 0
    assert (warning in done.stderr) if warning else ("--precision" not in done.stderr)
    config = read_config(tmp_path / "SST-2")
    assert config.precision == used
    assert f"precision='{used}'" in config.provenance.trainer
    assert config.processor.features == features_of(cpuinfo)
    record = json.loads((tmp_path / "SST-2" / "config.json").read_text())
    del record["precision"], record["processor"]
    (tmp_path / "SST-2" / "config.json").write_text(json.dumps(record))
    assert read_config(tmp_path / "SST-2").processor is None, "runs of earlier versions are read"
