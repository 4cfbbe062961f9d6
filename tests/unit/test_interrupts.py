"""An interrupt ends the program, wherever it arrives."""

import subprocess
import sys

import pytest

CODE = """
import os, signal, sys, time
from forward_influence.cli.interrupts import interrupt_once

interrupt_once()

class Deleted:
    def __del__(self):
        {inside}

try:
    Deleted()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("inside", ["os.kill(os.getpid(), signal.SIGINT)", "raise KeyboardInterrupt"])
def test_one_that_arrives_while_an_object_is_deleted_is_not_lost(inside):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(inside=inside)], capture_output=True, text=True, timeout=15
    )
    assert done.stdout == "interrupted\n"
    assert "KeyboardInterrupt" not in done.stderr


def test_other_errors_of_deletion_are_told_as_ever():
    code = CODE.format(inside="raise ValueError('own')").replace("time.sleep(20)", "raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert done.stdout == "interrupted\n" and "ValueError: own" in done.stderr
