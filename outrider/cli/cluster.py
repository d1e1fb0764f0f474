"""From the flags and variables of `outrider up` to how each service is started.

Every service gets only the flags and variables that its own configuration knows, and all of them
are checked before anything starts.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.cli.child import ChildPlan
from outrider.cli.ports import free_port, require_free
from outrider.serving.access import OwnAccess
from outrider.serving.config import (
    ENVIRONMENT_PREFIX,
    ServiceConfig,
    check_faults,
    parse_config,
    variable_name,
    variable_names,
)
from outrider.serving.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
NO_DRAFT = "none"
# A stage's time is the service's to bound; before its port is open nothing but imports takes time,
# and on a busy machine these take long.
SHORTEST_LAUNCH_TIMEOUT_SECONDS = 60.0
# Decided here, for every service its own: set from outside they would be ignored.
DECIDED_VARIABLES = {
    "OUTRIDER_TARGET_ADDRESS",
    "OUTRIDER_DRAFT_ADDRESS",
    # Target and draft are reached over loopback, in plain text.
    "OUTRIDER_TLS_PEER_CA",
}
# What the gateway asks of its callers; target and draft have no callers but this machine's.
GATEWAY_ONLY = ("tls_certificate", "tls_key", "tls_client_ca")
# With either of these the gateway asks for keys.
KEY_FIELDS = ("api_keys", "api_key_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKind:
    """A service that can be started: its module and the configuration that this reads."""

    service: str
    module: str
    config_class: type[ServiceConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKinds:
    """The three services."""

    target: ServiceKind
    draft: ServiceKind
    gateway: ServiceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `outrider up` was asked for. `flags` go to each service that knows them, by field
    name.
    """

    host: str
    rest_port: int
    port: int
    draft: str | None
    flags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ready to be started."""

    plans: tuple[ChildPlan, ...]
    url: str
    access: OwnAccess
    holds_failures: bool


def installed_services() -> ServiceKinds:
    """The services of this project."""
    # Here and not above: `outrider chat` and `outrider status` need none of them.
    from draft_service.config import DraftConfig
    from gateway.config import GatewayConfig
    from target_service.config import TargetConfig

    return ServiceKinds(
        target=ServiceKind(service="target", module="target_service", config_class=TargetConfig),
        draft=ServiceKind(service="draft", module="draft_service", config_class=DraftConfig),
        gateway=ServiceKind(service="gateway", module="gateway", config_class=GatewayConfig),
    )


def plan_cluster(
    options: ClusterOptions,
    kinds: ServiceKinds,
    *,
    own_variables: set[str],
    environment: Mapping[str, str],
) -> Cluster:
    """Raises ConfigurationError for anything that a service would refuse."""
    _check_variables(kinds, own_variables, environment)
    own_key = _own_key(options, environment)
    if own_key:
        known_keys = environment.get(variable_name("api_keys"), "")
        environment = {
            **environment,
            variable_name("api_keys"): ",".join(filter(None, (known_keys, own_key))),
        }
    has_draft = options.draft != NO_DRAFT
    ports: set[int] = set()

    def address(host: str, flag: str, port: int) -> str:
        if port:
            require_free(flag, host, port)
        else:
            port = free_port(host, ports)
        ports.add(port)
        return f"{host}:{port}"

    target = address(LOOPBACK, "", 0)
    draft = address(LOOPBACK, "", 0) if has_draft else ""
    gateway = address(options.host, "--port", options.port)
    rest = address(options.host, "--rest-port", options.rest_port)

    started = [kinds.target, *([kinds.draft] if has_draft else []), kinds.gateway]
    _check_flags(options, started)

    def planned(
        kind: ServiceKind, own_address: str, own_flags: Mapping[str, str]
    ) -> tuple[ChildPlan, ServiceConfig]:
        known = _fields(kind, kinds)
        flags = {name: value for name, value in options.flags.items() if name in known}
        host, _, port = own_address.rpartition(":")
        flags |= {"host": host, "port": port, **own_flags}
        return _plan(kind, known, own_address, flags, environment)

    members = []
    target_flags = {"draft_address": draft}
    if has_draft:
        draft_flags = {} if options.draft is None else {"draft": options.draft}
        members.append(planned(kinds.draft, draft, draft_flags))
        target_flags |= _shared_cores(members[0][1], kinds.target, environment)
    members.insert(0, planned(kinds.target, target, target_flags))
    gateway_flags = {
        "rest_port": _port(rest),
        "target_address": target,
        "draft_address": draft,
    }
    members.append(planned(kinds.gateway, gateway, gateway_flags))
    access = OwnAccess(api_key=own_key, tls=members[-1][1].tls)
    plans = [plan for plan, _ in members]
    plans[-1] = replace(plans[-1], access=access)
    return Cluster(
        plans=tuple(plans),
        url=f"{access.scheme}://{_reachable(options.host)}:{_port(rest)}",
        access=access,
        holds_failures=any(config.on_startup_failure == "hold" for _, config in members),
    )


def _own_key(options: ClusterOptions, environment: Mapping[str, str]) -> str:
    """A key of `up`'s own for a gateway that asks for keys, of which it may know only digests."""
    asks = any(
        environment.get(variable_name(name)) or options.flags.get(name) for name in KEY_FIELDS
    )
    return secrets.token_urlsafe(32) if asks else ""


def _fields(kind: ServiceKind, kinds: ServiceKinds) -> set[str]:
    """The flags and variables that a service is given here, by field name."""
    known = set(kind.config_class.model_fields)
    return known if kind is kinds.gateway else known.difference(GATEWAY_ONLY)


def _shared_cores(
    draft: ServiceConfig, target: ServiceKind, environment: Mapping[str, str]
) -> dict[str, str]:
    """A target that spins takes the cores from a model drafter beside it."""
    name = "spin_count"
    is_decided = variable_name(name) in environment
    computes_model = getattr(draft, "computes_model", False)
    if not computes_model or is_decided or name not in target.config_class.model_fields:
        return {}
    return {name: "0"}


def _plan(
    kind: ServiceKind,
    fields: set[str],
    address: str,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
) -> tuple[ChildPlan, ServiceConfig]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in sorted(flags.items())]
    taken = {variable_name(name) for name in fields} - {variable_name(name) for name in flags}
    child_environment = {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name in taken
    }
    # Log lines must not wait in a buffer for a process that dies.
    child_environment["PYTHONUNBUFFERED"] = "1"
    try:
        config = parse_config(kind.config_class, kind.service, arguments, child_environment)
        check_faults(kind.service, config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{kind.service}: {error}") from error
    plan = ChildPlan(
        service=kind.service,
        # -P: a folder of the same name where the command is run must not be taken for a service.
        arguments=("-P", "-m", kind.module, *arguments),
        environment=child_environment,
        address=f"{_reachable(config.host)}:{_port(address)}",
        launch_timeout_seconds=max(config.startup_timeout, SHORTEST_LAUNCH_TIMEOUT_SECONDS),
        drain_timeout_seconds=config.drain_timeout,
    )
    return plan, config


def _check_variables(
    kinds: ServiceKinds, own_variables: set[str], environment: Mapping[str, str]
) -> None:
    given = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    decided = sorted(given & DECIDED_VARIABLES)
    if decided:
        raise ConfigurationError(
            f"{', '.join(decided)}: `outrider up` decides itself how its services reach each other"
        )
    known = own_variables.union(
        *(variable_names(kind.config_class) for kind in (kinds.target, kinds.draft, kinds.gateway))
    )
    unknown = sorted(given - known)
    if unknown:
        raise ConfigurationError(
            f"unknown variable {', '.join(unknown)}; "
            f"outrider up knows {', '.join(sorted(known - DECIDED_VARIABLES))}"
        )


def _check_flags(options: ClusterOptions, kinds: list[ServiceKind]) -> None:
    for name in options.flags:
        if not any(name in kind.config_class.model_fields for kind in kinds):
            raise ConfigurationError(
                f"--{name.replace('_', '-')}: none of the services to be started knows it "
                f"({', '.join(kind.service for kind in kinds)})"
            )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _reachable(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "::", "") else host
