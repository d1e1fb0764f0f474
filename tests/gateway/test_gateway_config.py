"""Flags and variables of the gateway."""

import pytest

from gateway.boot import check_config
from gateway.config import GatewayConfig
from outrider.serving.config import parse_config
from outrider.serving.errors import ConfigurationError


def parse(*arguments: str) -> GatewayConfig:
    return parse_config(GatewayConfig, "gateway", arguments)


def test_a_flag_goes_before_its_variable(monkeypatch):
    assert parse().rest_port == 8000
    monkeypatch.setenv("OUTRIDER_REST_PORT", "2")
    assert parse().rest_port == 2
    assert parse("--rest-port", "1").rest_port == 1


def test_the_effective_configuration_is_shown_by_flag_name():
    shown = parse("--speculative-disable-batch-threshold", "4", "--require-draft").shown()
    assert shown["speculative-disable-batch-threshold"] == "4"
    assert shown["require-draft"] == "True"
    assert shown["batch-window-ms"] == "0.0"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("speculation", "maybe"),
        ("batch-window-ms", "-1"),
        ("batch-window-ms", "nan"),
        ("speculative-disable-batch-threshold", "-1"),
        ("speculative-disable-batch-threshold", "4294967296"),
        ("max-draft-length", "33"),
        ("max-waiting-requests", "0"),
        ("canary-acceptance", "never"),
        ("peer-timeout", "0"),
        ("rest-port", "65536"),
    ],
)
def test_a_value_out_of_its_bounds_is_an_error_that_names_the_flag(flag, value):
    with pytest.raises(ConfigurationError, match=flag):
        parse(f"--{flag}={value}")


def test_what_single_flags_cannot_say_is_checked_at_start_up():
    with pytest.raises(ConfigurationError, match="draft-address"):
        check_config(parse("--require-draft"))
    with pytest.raises(ConfigurationError, match="target-address"):
        check_config(parse("--target-address="))
    check_config(parse("--require-draft", "--draft-address", "127.0.0.1:1"))
