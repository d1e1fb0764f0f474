"""The `outrider` command: flags and variables into calls, errors into exit codes."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from outrider import __version__
from outrider.bench.measure import BenchError, Plan
from outrider.bench.plot import PlotError
from outrider.bench.prompts import PromptError, read_prompts
from outrider.cli.bench import Output, Servers, parse_flags, parse_loads, parse_modes, run_bench
from outrider.cli.chat import ChatOptions, converse
from outrider.cli.cluster import Cluster, ClusterOptions, installed_services, plan_cluster
from outrider.cli.completion import ServerError
from outrider.cli.demo import show
from outrider.cli.status import print_status
from outrider.cli.train import train_eagle3
from outrider.cli.up import announce_and_wait, run_up
from outrider.serving.access import HttpAccess, http_access
from outrider.serving.api_keys import line_of, new_key
from outrider.serving.config import variable_name
from outrider.serving.errors import ConfigurationError

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_CODE_OF_MISUSE = 2

app = typer.Typer(
    help="Outrider: speculative decoding as three services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Speculation(StrEnum):
    """Who decides about draft lengths."""

    AUTO = "auto"
    FIXED = "fixed"
    OFF = "off"


class OnStartupFailure(StrEnum):
    """What follows a failed start-up."""

    EXIT = "exit"
    HOLD = "hold"


def _option(flag: str, description: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{flag}", envvar=variable_name(flag), help=description, show_default=False
    )
    return option


ApiKey = Annotated[
    str,
    typer.Option(
        envvar="OPENAI_API_KEY", show_envvar=True, help="shown to the server as a bearer token"
    ),
]
TlsAuthorities = Annotated[
    str, typer.Option("--tls-ca", help="PEM file: whom to trust instead of the system's")
]
TlsCertificate = Annotated[
    str, typer.Option("--tls-certificate", help="PEM file: shown to a server that asks for one")
]
TlsKey = Annotated[str, typer.Option("--tls-key", help="PEM file: its private key")]

# The flags that `up` itself reads; all others of a service are its variables.
OWN_FLAGS = (
    "host",
    "rest-port",
    "port",
    "log-dir",
    "model",
    "draft",
    "draft-model",
    "speculation",
    "max-draft-length",
    "speculative-disable-batch-threshold",
    "dtype",
    "device",
    "threads",
    "on-startup-failure",
    "tls-certificate",
    "tls-key",
    "tls-client-ca",
    "api-key-file",
)


@app.command()
def up(
    rest_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, envvar=variable_name("rest-port"), help="REST port; 0: free"
        ),
    ] = 8000,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, envvar=variable_name("port"), help="gateway's gRPC; 0: free"
        ),
    ] = 0,
    host: Annotated[
        str, typer.Option(envvar=variable_name("host"), help="address that the gateway listens on")
    ] = "127.0.0.1",
    model: Annotated[
        str | None, _option("model", "default model's name, directory, GGUF file or Hub id")
    ] = None,
    draft: Annotated[
        str | None, _option("draft", "hybrid, eagle3, ngram, standalone or none")
    ] = None,
    draft_model: Annotated[
        str | None,
        _option("draft-model", "directory of an EAGLE-3 head, or checkpoint of a small model"),
    ] = None,
    speculation: Annotated[
        Speculation | None, _option("speculation", "who decides about draft lengths")
    ] = None,
    max_draft_length: Annotated[
        int | None, _option("max-draft-length", "most draft tokens per sequence and step")
    ] = None,
    speculative_disable_batch_threshold: Annotated[
        int | None,
        _option(
            "speculative-disable-batch-threshold",
            "steps with more decode rows run without the draft service; 0: never",
        ),
    ] = None,
    dtype: Annotated[str | None, _option("dtype", "bfloat16 or float32")] = None,
    device: Annotated[str | None, _option("device", "cpu or a GPU's name")] = None,
    threads: Annotated[
        int | None, _option("threads", "threads of the target and of a model drafter")
    ] = None,
    on_startup_failure: Annotated[
        OnStartupFailure | None,
        _option("on-startup-failure", "end, or keep everything up to be looked at"),
    ] = None,
    tls_certificate: Annotated[
        str | None, _option("tls-certificate", "PEM file that the gateway shows; REST and gRPC")
    ] = None,
    tls_key: Annotated[str | None, _option("tls-key", "PEM file of its private key")] = None,
    tls_client_ca: Annotated[
        str | None, _option("tls-client-ca", "PEM file: whose certificates clients must show")
    ] = None,
    api_key_file: Annotated[
        str | None, _option("api-key-file", "digests of the keys that clients must show")
    ] = None,
    log_dir: Annotated[
        Path | None, _option("log-dir", "one log file per service, not standard error")
    ] = None,
) -> None:
    """Run target, draft and gateway in the foreground; print `ready URL` when they are ready.

    Every flag is also a variable OUTRIDER_<FLAG>; so is every other flag of the three services.
    Ctrl-C drains and stops, twice kills.
    """
    given = {
        "model": model,
        "draft_model": draft_model,
        "speculation": speculation,
        "max_draft_length": max_draft_length,
        "speculative_disable_batch_threshold": speculative_disable_batch_threshold,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "on_startup_failure": on_startup_failure,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "api_key_file": api_key_file,
    }
    options = ClusterOptions(
        host=host,
        rest_port=rest_port,
        port=port,
        draft=draft,
        flags={name: str(value) for name, value in given.items() if value is not None},
    )
    try:
        code = run_up(_plan(options, os.environ), log_directory=log_dir, work=announce_and_wait)
    except ConfigurationError as error:
        _refuse("up", error)
    raise typer.Exit(code)


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="one question; without it, a conversation")
    ] = None,
    url: Annotated[str, typer.Option(help="a running server")] = DEFAULT_URL,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="the text is the same")
    ] = True,
    api_key: ApiKey = "",
    tls_ca: TlsAuthorities = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
) -> None:
    """Talk to a running server; answers stream, figures follow."""
    options = ChatOptions(
        temperature=temperature, seed=seed, max_tokens=max_tokens, speculates=speculation
    )
    access = _access("chat", api_key, tls_ca, tls_certificate, tls_key)
    raise typer.Exit(asyncio.run(converse(url, question, options, access)))


@app.command()
def status(
    url: Annotated[str, typer.Option(help="a running server")] = DEFAULT_URL,
    api_key: ApiKey = "",
    tls_ca: TlsAuthorities = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
) -> None:
    """Show services, states, stages and reasons; exit with 0 only when ready."""
    access = _access("status", api_key, tls_ca, tls_certificate, tls_key)
    raise typer.Exit(print_status(url, access))


@app.command("api-key")
def api_key(
    name: Annotated[str, typer.Argument(help="whose key: letters, digits, '.', '@', '_', '-'")],
) -> None:
    """Make a key: to standard output the line for --api-key-file, to standard error the key.

    The line holds the key's digest alone: `outrider api-key alice >> keys` shows the key once.
    """
    key = new_key()
    try:
        line = line_of(name, key)
    except ConfigurationError as error:
        _refuse("api-key", error)
    typer.echo(line)
    typer.echo(key, err=True)


@app.command()
def demo() -> None:
    """Start the services, stream one answer with speculation and the same without, stop."""
    log_directory = Path(tempfile.mkdtemp(prefix="outrider-demo-"))
    try:
        code = run_up(_plan_own({}), log_directory=log_directory, work=show)
    except ConfigurationError as error:
        _refuse("demo", error)
    except ServerError as error:
        typer.echo(f"outrider demo: {error}", err=True)
        code = 1
    if code == 0:
        shutil.rmtree(log_directory)
    else:
        typer.echo(f"outrider demo: the services' logs are in {log_directory}", err=True)
    raise typer.Exit(code)


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="any OpenAI-compatible server")] = DEFAULT_URL,
    modes: Annotated[
        str,
        typer.Option(
            help="start an own server in each of these modes instead, in turn: off, auto, or a "
            "fixed draft length, for example off,3,5,auto"
        ),
    ] = "",
    up: Annotated[
        list[str] | None,
        typer.Option(help="FLAG=VALUE for the own servers, as of `outrider up`; again for more"),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="requests at once, one run each; without --rate 1,4,16")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="requests a second at random times, one run each: 0.5,2")
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines with turns (as Spec-Bench's), prompt or question; without it, a "
            "small set of many kinds"
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(min=0, help="of a run; 0: four a place, at least as many as prompts"),
    ] = 0,
    warm_up: Annotated[
        int, typer.Option(min=-1, help="requests before each run; -1: as many as its load")
    ] = -1,
    repeat: Annotated[int, typer.Option(min=1, help="runs of everything, in turn")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens of an answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="of the prompts' order, arrivals and requests")] = 0,
    completions: Annotated[
        bool, typer.Option("--completions", help="/v1/completions, without a chat template")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="whole length, from servers that know the word")
    ] = False,
    model: Annotated[str, typer.Option(help="the first that the server lists, if not given")] = "",
    api_key: ApiKey = "",
    tls_ca: TlsAuthorities = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="file for all figures")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="PNG file for the curves")
    ] = None,
) -> None:
    """Measure throughput and latency of a server, or of speculation off, fixed and automatic.

    Prints a table: tokens and requests a second; time to the first token, between tokens and of
    whole requests; of an Outrider server also acceptance length and the share of steps without
    drafts.
    """
    try:
        servers = Servers(
            url=url.removesuffix("/").removesuffix("/v1"),
            modes=parse_modes(modes),
            flags=parse_flags(up or []),
            plan_cluster=_plan_own,
        )
        plan = Plan(
            prompts=read_prompts(prompts),
            loads=parse_loads(concurrency or ("" if rate else "1,4,16"), rate),
            requests=requests,
            warm_up=warm_up,
            max_tokens=max_tokens,
            temperature=temperature,
            is_chat=not completions,
            ignores_eos=ignore_eos,
            seed=seed,
            model=model,
            access=http_access(
                api_key=api_key, ca=tls_ca, certificate=tls_certificate, key=tls_key
            ),
        )
        code = run_bench(
            servers, plan, repeat=repeat, output=Output(json=json_file, plot=plot_file)
        )
    except (ConfigurationError, PromptError, PlotError) as error:
        _refuse("bench", error)
    except BenchError as error:
        typer.echo(f"outrider bench: {error}", err=True)
        code = 1
    raise typer.Exit(code)


# The arguments are those of the package `training`, its --help included.
@app.command(
    "train-eagle3",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context) -> None:
    """Train an EAGLE-3 head for a target: data, training, evaluation; see its own --help."""
    raise typer.Exit(train_eagle3(context.args))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _plan_own(flags: Mapping[str, str]) -> Cluster:
    """A cluster of this machine's, at free ports, from flags of `up` by field name. It is for its
    one caller: nobody is asked for a key or a certificate.
    """
    rest = {name: value for name, value in flags.items() if name != "draft"}
    guards = ("OUTRIDER_API_KEY", "OUTRIDER_TLS_")
    return _plan(
        ClusterOptions(host="127.0.0.1", rest_port=0, port=0, draft=flags.get("draft"), flags=rest),
        {name: value for name, value in os.environ.items() if not name.startswith(guards)},
    )


def _plan(options: ClusterOptions, environment: Mapping[str, str]) -> Cluster:
    return plan_cluster(
        options,
        installed_services(),
        own_variables={variable_name(flag) for flag in OWN_FLAGS},
        environment=environment,
    )


def _access(command: str, api_key: str, ca: str, certificate: str, key: str) -> HttpAccess:
    try:
        return http_access(api_key=api_key, ca=ca, certificate=certificate, key=key)
    except ConfigurationError as error:
        _refuse(command, error)


def _refuse(command: str, error: Exception) -> NoReturn:
    typer.echo(f"outrider {command}: {error}", err=True)
    raise typer.Exit(EXIT_CODE_OF_MISUSE)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
