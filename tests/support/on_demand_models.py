"""More models than fit, loaded by requests: a repository of small ones, and a service in the process of the test."""

from contextlib import asynccontextmanager

import numpy as np

from tests.support.in_process import running_service
from tests.support.letters_model import text_request, write_letters_bundle, write_letters_head
from tests.support.models import serialized, write_oracle_bundle
from tests.support.sample_requests import raw_request, with_parameters
from tests.support.server_models import failing_graph, write_bundle_of

NAMES = "abcde"


def write(repository, names=NAMES):
    """Models that return the element at an index; each has elements of its own."""
    for name in names:
        index = np.array([1], np.int64)
        elements = np.arange(3) + 10 * ord(name)
        graph = failing_graph("element", elements)
        write_bundle_of(repository, name, serialized(graph), {"index": index}, {"element": elements[index]})


def write_versions(repository):
    """Write the oracle as the versions 1 and 2 of ``v``."""
    for version in (1, 2):
        write_oracle_bundle(repository / str(version), "v", version)


def request_to(name, index=2, **parameters):
    return with_parameters(raw_request(name, index=np.array([index], np.int64)), parameters)


async def ask(running, name, index=2, deadline=None, **parameters):
    response = await running.infer(request_to(name, index, **parameters), deadline)
    assert response.model_name == name
    assert np.frombuffer(response.raw_output_contents[0], np.int64) == [10 * ord(name) + index]


def loaded(running):
    return {entry.name for entry in running.repository if entry.state in ("READY", "UNLOADING")}


def serving(directory, most, write=write, **options):
    return running_service(directory, write, mode="on-demand", max_loaded=most, **options)


@asynccontextmanager
async def heads(directory, most):
    def write_letters(repository):
        base = write_letters_bundle(repository / "base")
        write_letters_head(repository / "head", base, "head", 1)
        write(repository, "a")

    async with serving(directory, most, write_letters) as running:
        yield running, text_request("abc", head="head", max_tokens=3)
