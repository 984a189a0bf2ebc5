import sys

import pytest

from tests.compatibility.changes import install_commands


@pytest.fixture(autouse=True, scope="module")
def _commands_of_this_tree(tmp_path_factory):
    """Find the commands of pyproject.toml, even if the installed package still has others."""
    directory = tmp_path_factory.mktemp("commands")
    install_commands(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(directory), *sys.path])
        yield
