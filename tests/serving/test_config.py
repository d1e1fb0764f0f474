import pytest
from pydantic import Field

from outrider.serving.config import Port, ServiceConfig, parse_config
from outrider.serving.errors import ConfigurationError


class ExampleConfig(ServiceConfig):
    """An example."""

    port: Port = Field(1234, description="the port")
    draft_address: str = Field("", description="the draft service")
    require_draft: bool = Field(False, description="not ready without it")


def parse(*arguments: str) -> ExampleConfig:
    return parse_config(ExampleConfig, "example", arguments)


def test_a_flag_goes_before_its_variable_and_a_variable_before_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse().port == 1234
    monkeypatch.setenv("OUTRIDER_PORT", "5")
    monkeypatch.setenv("OUTRIDER_REQUIRE_DRAFT", "true")
    assert (parse().port, parse().require_draft) == (5, True)
    assert parse("--port", "6", "--no-require-draft").port == 6


def test_an_unknown_variable_is_an_error_that_names_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_PROT", "5")
    with pytest.raises(ConfigurationError, match=r"OUTRIDER_PROT; .*OUTRIDER_PORT"):
        parse()


def test_an_unknown_flag_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--prot", "5")
    assert exit_info.value.code == 2
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "65536"), "port is '65536'.*65535"),
        (("--port", "x"), "port is 'x'"),
        (("--startup-timeout", "0"), "startup-timeout is '0'.*greater than 0"),
        (("--on-startup-failure", "ignore"), "on-startup-failure is 'ignore'.*'exit' or 'hold'"),
    ],
)
def test_a_bad_value_is_named_with_its_bound(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(*arguments)


def test_help_shows_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    for name in ExampleConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"OUTRIDER_{name.upper()}" in shown


def test_the_effective_configuration_is_shown_by_flag() -> None:
    shown = parse("--draft-address", "127.0.0.1:1").shown()
    assert shown["draft-address"] == "127.0.0.1:1"
    assert shown["startup-timeout"] == "120.0"
