"""Rules for builds that need no TensorRT: optimization profiles, warnings, memory and progress."""

from edge.bundles.manifest import Profile
from edge.runtimes.runtime import BuildProgress
from edge.runtimes.tensorrt.build import memory_needed
from edge.runtimes.tensorrt.network import Attention, unexplained
from edge.runtimes.tensorrt.package import BuilderLog
from edge.runtimes.tensorrt.profiles import buckets, described, optimization_profiles

MIB = 1024**2


def text(shortest, longest, rows=8):
    shapes = Profile(min=(1, shortest), opt=(1, min(64, longest)), max=(rows, longest))
    return {"input_ids": shapes, "attention_mask": shapes}


def test_buckets_cover_every_length_once():
    for shortest, longest, expected in (
        (1, 512, [(1, 32), (33, 64), (65, 128), (129, 256), (257, 512)]),
        (40, 100, [(40, 64), (65, 100)]),
        (1, 32, [(1, 32)]),
        (1, 33, [(1, 32), (33, 33)]),
        (1, 8192, [(1, 32), (33, 64), (65, 128), (129, 256), (257, 512), (513, 8192)]),
    ):
        profiles = buckets(text(shortest, longest))
        assert [(one["input_ids"].min[1], one["input_ids"].max[1]) for one in profiles] == expected
        for one in profiles:
            shapes = one["input_ids"]
            assert (one["attention_mask"], shapes.min[0], shapes.opt[0], shapes.max[0]) == (shapes, 1, 1, 8)
            assert shapes.opt[1] == shapes.max[1]


def test_only_one_sequence_axis_is_cut():
    image = {"pixels": Profile(min=(1, 3, 32, 32), opt=(1, 3, 224, 224), max=(4, 3, 512, 640))}
    two = {**text(1, 512), "other": Profile(min=(1, 1), opt=(1, 8), max=(8, 100))}
    fixed = {"x": Profile(min=(1, 15), opt=(8, 15), max=(64, 15))}
    for profile in (image, two, fixed):
        assert buckets(profile) == (profile,)
    assert buckets({}) == ()
    beside = {**text(1, 64), "x": Profile(min=(1, 15), opt=(8, 15), max=(64, 15))}
    assert [one["x"] for one in buckets(beside)] == [beside["x"], beside["x"]]
    assert described(buckets(text(1, 64))[1]) == "attention_mask 1x33..1x64..8x64, input_ids 1x33..1x64..8x64"


def test_several_profiles_of_a_file_are_not_cut():
    prompts, steps = text(2, 512), text(1, 1)
    assert optimization_profiles(steps, [prompts]) == (steps, prompts)
    assert optimization_profiles(prompts) == buckets(prompts) != (prompts,)


def test_builder_log_counts_skipped_tactics_and_finds_a_lack_of_memory():
    log = BuilderLog()
    log.hear("Using default for use_cuda_graph")
    assert (log.skipped_tactics, log.warning(), log.out_of_memory) == (0, "", "")
    for size in (4229, 512):
        log.hear(f"Tactic Device request: {size}MB Available: 2658MB. Device memory is insufficient to use tactic.")
        log.hear(
            f"UNSUPPORTED_STATESkipping tactic 0 due to insufficient memory on requested size of {size} detected for "
            "tactic 0x0000000000000000."
        )
    assert (log.skipped_tactics, log.out_of_memory) == (2, "")
    assert log.warning().startswith("2 tactics were skipped for lack of memory of up to 4,229 MiB each, so")
    log.hear("[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested size was 8 bytes.)")
    assert "OutOfMemory" in log.out_of_memory


def test_unfused_attention_is_noted_only_if_fusion_is_possible():
    assert not unexplained([Attention("HALF", 32, 32)], True)
    for blocks, allowed in (
        ([Attention("HALF", 32, 32)], "32 in HALF"),
        ([Attention("HALF", 8, 8), Attention("BF16", 64, 64)], "64 in BF16"),
        ([Attention("HALF", 8, 8)], ""),
        ([Attention("FLOAT", 32, 32)], ""),
    ):
        expected = f"attention is not fused although head dimension {allowed} allows it"
        assert expected in unexplained(blocks, False) if allowed else not unexplained(blocks, False)


def test_memory_of_a_build_grows_with_the_model_and_the_workspace():
    small, large = memory_needed(10 * MIB, 512 * MIB), memory_needed(110 * MIB, 512 * MIB)
    assert large.size_bytes - small.size_bytes == 4 * 100 * MIB
    assert large.pinned_bytes - small.pinned_bytes == 2 * 100 * MIB
    assert memory_needed(10 * MIB, 256 * MIB).pinned_bytes == small.pinned_bytes - 256 * MIB
    assert 1700 * MIB < small.size_bytes - 512 * MIB < 2000 * MIB  # what was measured on an Orin: about 1.7 GB


def test_progress_for_people():
    assert str(BuildProgress("Timing", 0.42)) == "42 %"
    assert str(BuildProgress("Timing", 0.42, 45.4)) == "42 %, 45 s left"
    assert str(BuildProgress("Timing", 0.42, 181)) == "42 %, 3 min left"
