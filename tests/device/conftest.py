"""Fixtures for the device of these tests: the software device, or with ``-m gpu`` a real GPU."""

from functools import cache

import pytest

from tests.device.software import SoftwareDriver, library


@cache
def missing():
    """Return why no test of this directory can run; None if there is a device."""
    try:
        import pycuda.driver as cuda
    except ImportError as error:
        return f"no pycuda on a CUDA driver ({error}); run `make test-device`"
    try:
        cuda.init()
        return None if cuda.Device.count() else "no CUDA device"
    except cuda.Error as error:
        return f"no CUDA device ({error})"


class Skipped(pytest.Module):
    """A file of tests that is not even imported."""

    def collect(self):
        pytest.skip(missing() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if missing() else None


def pytest_itemcollected(item):
    if library() is None:
        item.add_marker("gpu")


@pytest.fixture(scope="session")
def device():
    return "real" if library() is None else "software"


@pytest.fixture
def software():
    """The software driver; skips the test on a real device."""
    driver = library()
    if driver is None:
        pytest.skip("needs the software device")
    return SoftwareDriver(driver)


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaks an object on the software device, or has a defect that CUDA tolerates."""
    if (driver := library()) is None:
        yield
        return
    software = SoftwareDriver(driver)
    try:
        with software.watched():
            yield
    finally:
        lost = software.error() or any(software.live().values())
        software.reset() if lost else software.clear()


@pytest.fixture(params=[0, 1 << 20], ids=["copies apart", "copies in the graph"])
def captured_bytes(request, monkeypatch):
    """The most bytes of inputs whose copy is part of a run's graph."""
    monkeypatch.setattr("edge.runtimes.tensorrt.runner.CAPTURED_BYTES", request.param)
    return request.param
