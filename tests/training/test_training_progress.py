"""Progress on a terminal that is 60 columns wide, and without a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from training.progress import open_progress

PROGRAM = """
from training.progress import open_progress
import threading
progress = open_progress()
assert threading.active_count() == 1
progress.note("a note [in brackets]")
progress.show(0.5, "update 7  " + "loss 1.234  " * 8 + "the end")
progress.close()
"""


def test_a_terminal_shows_a_bar_above_the_whole_report() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:
            pass  # how a terminal ends when its last writer has gone
        os.close(ours)
        assert process.wait(30) == 0
        assert process.stdout is not None and process.stdout.read() == b""
    shown = text.decode()
    assert "a note [in brackets]" in shown
    assert " 50%" in shown and "━" in shown
    assert "update 7" in shown and "the end" in shown


def test_elsewhere_every_report_is_a_line_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = open_progress()
    progress.note("a note")
    progress.show(0.5, "update 7")
    progress.close()
    captured = capsys.readouterr()
    assert captured.err == "a note\n 50.0%  update 7\n"
    assert captured.out == ""
