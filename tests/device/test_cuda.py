"""Memory, copies, events and graphs of the driver without TensorRT, so that a GPU with pycuda alone runs them, too."""

import threading

import numpy as np
import pytest

from edge.runtimes.cuda import CudaDevice, Slices
from tests.gpu.times import COUNTS, times

SIZE = 1 << 16


@pytest.fixture
def opened():
    device = CudaDevice()
    try:
        with device:
            yield device
    finally:
        device.close()


def some(size=SIZE):
    return np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)


def test_bytes_return_from_the_device_by_every_kind_of_copy(opened):
    stream, data, back = opened.stream(), some(), np.zeros(SIZE, np.uint8)
    first, second = opened.allocate(SIZE), opened.allocate(SIZE)
    pinned, mapped = opened.allocate_host(SIZE), opened.allocate_host(SIZE, mapped=True)
    pinned.bytes[:], mapped.bytes[:] = data, data[::-1]
    opened.copy_in(first.address, pinned.bytes, stream)
    opened.copy(second.address, first.address, SIZE, stream)
    opened.clear(second.address, SIZE // 2, stream)
    stream.synchronize()
    opened.download(back, second.address)
    assert not back[: SIZE // 2].any()
    np.testing.assert_array_equal(back[SIZE // 2 :], data[SIZE // 2 :])
    opened.copy(second.address, mapped.address, SIZE, stream)  # the device reads the host's memory
    opened.copy_out(pinned.bytes, second.address, stream)
    opened.event().record(stream).synchronize()
    np.testing.assert_array_equal(pinned.bytes, data[::-1])
    for memory in (first, second, pinned, mapped):
        memory.free()


def test_slices_are_copied_between_different_pitches(opened):
    width, lines, slices = 8, 3, 2
    source, target = opened.allocate(slices * lines * 16), opened.allocate(slices * 4 * 32)
    data, back, stream = some(slices * lines * 16), np.zeros(slices * 4 * 32, np.uint8), opened.stream()
    opened.upload(source.address, data)
    opened.upload(target.address, back)
    shape = (width, lines, slices)
    opened.copy_slices(Slices(target.address, 32, 4), Slices(source.address, 16, lines), shape, stream)
    stream.synchronize()
    opened.download(back, target.address)
    expected = np.zeros((slices, 4, 32), np.uint8)
    expected[:, :lines, :width] = data.reshape(slices, lines, 16)[..., :width]
    np.testing.assert_array_equal(back.reshape(expected.shape), expected)
    source.free()
    target.free()


def test_a_graph_replays_addresses_and_a_failed_capture_leaves_a_usable_stream(opened):
    stream, memory, pinned = opened.stream(), opened.allocate(SIZE), opened.allocate_host(SIZE)

    def through_the_device():
        opened.copy_in(memory.address, pinned.bytes[: SIZE // 2], stream)
        opened.copy_out(pinned.bytes[SIZE // 2 :], memory.address, stream)

    def failing():
        through_the_device()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        opened.capture(stream, failing)
    pinned.bytes[:] = 0
    graph = opened.capture(stream, through_the_device)
    assert not pinned.bytes.any(), "a capture executes nothing"
    for value in (3, 5):
        pinned.bytes[: SIZE // 2] = value
        graph.launch(stream)
        stream.synchronize()
        assert (pinned.bytes[SIZE // 2 :] == value).all()
    graph.free()
    memory.free()
    pinned.free()


def test_another_thread_cannot_use_a_device():
    device, raised = CudaDevice(), list[str]()

    def use():
        with pytest.raises(RuntimeError, match="belongs to the thread MainThread, but other uses it") as caught:
            device.__enter__()
        raised.append(str(caught.value))

    thread = threading.Thread(target=use, name="other")
    thread.start()
    thread.join()
    device.close()
    assert raised


def test_every_time_is_measured_with_correct_copies():
    found = times(repetitions=2, sizes_bytes=(4096, SIZE))
    kinds = {(one["direction"], one["host"], one["bytes"]) for one in found["copies"]}
    assert len(kinds) == len(found["copies"]) == 8
    assert [one["operations"] for one in found["graphs"]] == [*COUNTS]
    measured = [one["us"] for one in found["copies"]] + [value for one in found["graphs"] for value in one.values()]
    for name in ("launch", "event", "streams"):
        measured += found[name].values()
    assert min(measured) > 0
