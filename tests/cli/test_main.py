"""The `outrider` command as it is called."""

import hashlib
import subprocess
import sys
from pathlib import Path

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
        (
            ("up", "--rest-port", "0", "--threads=-1"),
            "threads is '-1': Input should be greater than or equal to 0",
        ),
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


def test_train_eagle3_has_the_help_of_the_package_training() -> None:
    done = outrider("train-eagle3", "--help")
    assert done.exit_code == 0
    assert done.stdout.startswith("usage: outrider train-eagle3 --output DIR --max-seconds N")
    assert "--generate-seconds" in done.stdout
    assert "train-eagle3" in outrider("--help").stdout


def test_train_eagle3_passes_on_what_training_answers(tmp_path: Path) -> None:
    done = outrider("train-eagle3", "--output", str(tmp_path))
    assert done.exit_code == 2
    assert "give --max-seconds or --max-updates" in done.stderr
    no_data = ("--data", str(tmp_path / "none"), "--max-seconds", "1", "--device", "cpu")
    done = outrider(
        "train-eagle3", "--output", str(tmp_path), "--target", str(tmp_path / "absent"), *no_data
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and "absent" in done.stderr


def test_train_eagle3_names_what_is_missing_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = outrider("train-eagle3", "--output", str(tmp_path), "--max-seconds", "1")
    assert done.exit_code == 1
    assert "training needs torch: pip install 'outrider[train]'" in done.stderr


def test_a_new_key_is_shown_once_and_its_line_is_a_digest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli.main", "api-key", "alice"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    key = done.stderr.strip()
    name, digest = done.stdout.split()
    assert (name, digest) == ("alice", f"sha256:{hashlib.sha256(key.encode()).hexdigest()}")
    assert key not in done.stdout
    assert outrider("api-key", "not a name").exit_code == 2
