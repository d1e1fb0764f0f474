"""Configuration of a process: flags and `OUTRIDER_*` variables into one frozen model, parsed once.

A flag goes before its variable. An unknown flag or variable is an error, never a silent default.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import parse_faults
from outrider.serving.tls import TlsFiles, check_tls

ENVIRONMENT_PREFIX = "OUTRIDER_"


DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")


def _check_device(device: str) -> str:
    if not DEVICE_NAME.fullmatch(device):
        raise ValueError("must be cpu, cuda or cuda:N")
    return device


Device = Annotated[str, AfterValidator(_check_device)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class ServiceConfig(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        extra="forbid",
        frozen=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    startup_timeout: Seconds = Field(120.0, description="seconds that each start-up stage may take")
    step_timeout: Seconds = Field(
        30.0, description="seconds that one engine step or proposal may take"
    )
    drain_timeout: Seconds = Field(
        30.0, description="seconds that running requests may take after SIGTERM"
    )
    on_startup_failure: Literal["exit", "hold"] = Field(
        "exit", description="exit non-zero after a failure, or stay up to explain it"
    )
    tls_certificate: str = Field(
        "", description="PEM file of the certificate shown to callers; empty = no TLS"
    )
    tls_key: str = Field("", description="PEM file of its private key")
    tls_client_ca: str = Field(
        "",
        description="PEM file of authorities: callers must show a certificate of one of them; "
        "empty = they need none",
    )
    tls_peer_ca: str = Field(
        "",
        description="PEM file of the authorities of the services that this one calls, over TLS; "
        "empty = these are called in plain text",
    )
    inject_fault: str = Field("", description="faults for tests: service:point:action[,...]")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Flags and variables are both read by `parse_config`, from what it is given.
        return (init_settings,)

    @property
    def tls(self) -> TlsFiles:
        """The TLS files as one value."""
        return TlsFiles(
            certificate=self.tls_certificate,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            peer_ca=self.tls_peer_ca,
        )

    def check_combination(self) -> None:
        """Raises ConfigurationError where values that are right alone do not fit together."""

    def shown(self) -> dict[str, str]:
        """The effective configuration by flag name, for the status."""
        return {
            name.replace("_", "-"): "" if value is None else str(value)
            for name, value in self.model_dump().items()
        }


Config = TypeVar("Config", bound=ServiceConfig)


def variable_name(name: str) -> str:
    """The environment variable of a flag or field."""
    return ENVIRONMENT_PREFIX + name.replace("-", "_").upper()


def variable_names(config_class: type[BaseSettings]) -> set[str]:
    """The environment variables that a configuration reads."""
    return set(map(variable_name, config_class.model_fields))


def parse_config(
    config_class: type[Config],
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Flags and variables into a configuration. Raises ConfigurationError; `--help` exits with
    0.
    """
    environment = os.environ if environment is None else environment
    known = variable_names(config_class)
    # Variables are read whatever their case, so that a misspelt one is one in any case.
    unknown = sorted(
        name
        for name in environment
        if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in known
    )
    if unknown:
        raise ConfigurationError(
            f"unknown variable {', '.join(unknown)}; {program} knows {', '.join(sorted(known))}"
        )
    source: CliSettingsSource[object] = CliSettingsSource(
        _with_variables_in_help(config_class),
        cli_parse_args=list(arguments),
        cli_prog_name=program,
        cli_exit_on_error=True,
    )
    try:
        config = config_class(**{**_variables(config_class, environment), **source()})
    except ValidationError as error:
        raise ConfigurationError(_words(error)) from error
    config.check_combination()
    check_tls(config.tls)
    return config


def _variables(config_class: type[BaseSettings], environment: Mapping[str, str]) -> dict[str, str]:
    names = {variable_name(name): name for name in config_class.model_fields}
    return {
        names[variable.upper()]: value
        for variable, value in environment.items()
        if variable.upper() in names
    }


def check_faults(service: str, config: ServiceConfig) -> None:
    """Raises ConfigurationError if inject_fault names something that is not there."""
    parse_faults(service, config.inject_fault)


def exit_with(error: ConfigurationError, program: str) -> NoReturn:
    """Says what is wrong with the configuration and exits with 2."""
    print(f"{program}: {error}", file=sys.stderr)
    raise SystemExit(2)


def _with_variables_in_help(config_class: type[Config]) -> type[Config]:
    documented = {
        name: (
            field.annotation,
            Field(
                default=field.default,
                description=f"{field.description} [{variable_name(name)}]",
            ),
        )
        for name, field in config_class.model_fields.items()
    }
    namespace = {
        "__annotations__": {name: annotation for name, (annotation, _) in documented.items()},
        "__doc__": config_class.__doc__,
        **{name: field for name, (_, field) in documented.items()},
    }
    documented_class: type[Config] = type(config_class.__name__, (config_class,), namespace)
    return documented_class


def _words(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']).replace('_', '-')} "
        f"is {item['input']!r}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    )
