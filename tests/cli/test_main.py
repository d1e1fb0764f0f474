"""The `outrider` command as it is called."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from outrider import __version__
from outrider.cli.main import app


def outrider(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300", **variables})


def test_an_unknown_variable_is_an_error_that_names_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli.main", "up", "--rest-port", "0"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OUTRIDER_MAX_DRAFT_LENGHT": "3"},
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("outrider up: unknown variable OUTRIDER_MAX_DRAFT_LENGHT")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--no-such-flag"), "No such option"),
        (("up", "--speculation", "maybe"), "'maybe' is not one of"),
        (("up", "--rest-port", "70000"), "65535"),
        (("up", "--rest-port", "0", "--draft", "tarot"), "outrider up: draft: draft is 'tarot'"),
        (("up", "--rest-port", "0", "--threads=-1"), "outrider up: target: threads is '-1'"),
        (("frobnicate",), "No such command"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_it(arguments: tuple[str, ...], words: str) -> None:
    done = outrider(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_a_flag_is_also_a_variable() -> None:
    done = outrider("up", OUTRIDER_DRAFT="tarot", OUTRIDER_REST_PORT="0")
    assert done.exit_code == 2
    assert "draft is 'tarot'" in done.stderr


def test_every_flag_of_up_shows_its_variable() -> None:
    text = outrider("up", "--help").stdout
    for flag in ("rest-port", "model", "draft", "speculative-disable-batch-threshold", "log-dir"):
        assert f"--{flag}" in text
        assert f"OUTRIDER_{flag.upper().replace('-', '_')}" in text


def test_the_version_is_told() -> None:
    assert outrider("--version").stdout.strip() == __version__
