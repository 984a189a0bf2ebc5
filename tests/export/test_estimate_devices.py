"""Boards and power modes, and their one notation."""

import pytest

from edge.errors import UsageError
from export.estimate.devices import BOARD_MODES, DEVICES, board_mode, mode_of


def test_a_board_and_its_mode_have_one_notation():
    found = board_mode("orin-nano-super:15W")
    assert (found.board, found.power_mode, str(found)) == ("orin-nano-super", "15W", "orin-nano-super:15W")
    assert found.mode == mode_of(*found) == DEVICES["orin-nano-super"].modes["15W"]
    assert [board_mode(str(each)) for each in BOARD_MODES] == list(BOARD_MODES.values())


@pytest.mark.parametrize("text", ["", "orin-nano-super", "orin-nano:25W", "agx-orin:15W", "orin-nano-super:15w"])
def test_an_unknown_board_or_mode_is_answered_with_all(text):
    with pytest.raises(UsageError) as raised:
        board_mode(text, "--target")
    every = "orin-nano-super:15W, orin-nano-super:25W, orin-nano-super:MAXN_SUPER, orin-nano:7W, orin-nano:15W"
    assert str(raised.value) == f"--target: got {text!r}, expected BOARD:MODE, one of {every}. Give one of these."


def test_mode_of_names_the_boards_and_the_modes():
    boards = r"orin-nano-super \(15W, 25W, MAXN_SUPER\) or orin-nano \(7W, 15W\)\. "
    with pytest.raises(UsageError, match=rf"^--device: got 'nano', expected {boards}"):
        mode_of("nano", "15W")
    with pytest.raises(UsageError, match=r"^--mode: got 'MAXN_SUPER', expected one of 7W, 15W, the modes of orin-nano"):
        mode_of("orin-nano", "MAXN_SUPER")
