"""`outrider status`: the gateway's /status as tables for people."""

import sys
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.progress import STAGE_STYLES, STATE_STYLES
from outrider.cli.words import one_line
from outrider.serving.access import OPEN_ACCESS, HttpAccess

TIMEOUT_SECONDS = 5.0


def print_status(url: str, access: HttpAccess = OPEN_ACCESS) -> int:
    """Prints what the server at `url` knows; 0 only if it is ready."""
    try:
        response = httpx.get(
            f"{url}/status",
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
            headers=access.headers,
            verify=access.verify,
        )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        print(f"outrider status: nothing answers at {url}: {reason}", file=sys.stderr)
        return 1
    if response.status_code != httpx.codes.OK:
        print(
            f"outrider status: {url}/status answered {response.status_code}: "
            f"{one_line(response.text)[:200]}",
            file=sys.stderr,
        )
        return 1
    page = response.json()
    console = Console()
    for part in status_parts(url, page):
        console.print(part)
    return 0 if page["ready"] else 1


def status_parts(url: str, page: dict[str, Any]) -> list[Table | Text]:
    """A line about all, a table of services, a table of stages and one of links."""
    parts: list[Table | Text] = [_headline(url, page), _services(page), _stages(page)]
    links = [link for details in page["details"].values() for link in details["links"]]
    if links:
        parts.append(_links(links))
    return parts


def _headline(url: str, page: dict[str, Any]) -> Text:
    if not page["ready"]:
        return Text(f"{url} is not ready", style="bold red")
    if page["degraded"]:
        return Text(f"{url} is ready, degraded: without drafts", style="bold yellow")
    return Text(f"{url} is ready", style="bold green")


def _services(page: dict[str, Any]) -> Table:
    table = _table("service", "state", "process", "up", "device", "version", "stage", "reason")
    for service in page["services"]:
        details = page["details"].get(service["service"])
        table.add_row(
            service["service"],
            Text(service["state"], style=STATE_STYLES.get(service["state"], "yellow")),
            *_process(details),
            service["stage"],
            Text(one_line(service["reason"])),
        )
    return table


def _process(details: dict[str, Any] | None) -> tuple[str, str, str, str]:
    if details is None:
        return "", "", "", ""
    return (
        str(details["process_id"]),
        f"{details['uptime_seconds']:.0f} s",
        _device(details),
        details["version"],
    )


def _device(details: dict[str, Any]) -> str:
    gpu = details["gpu"]
    if gpu is None:
        return str(details["device"])
    used, total = (gpu[f"memory_{what}_bytes"] / 2**30 for what in ("used", "total"))
    words = f"{details['device']}, {gpu['name']}, {used:.1f} of {total:.0f} GiB in use"
    if gpu["utilization"] is not None:
        words += f", {gpu['utilization']:.0%} busy"
    if gpu["power_watts"] is not None:
        words += f", {gpu['power_watts']:.0f} W"
    return words


def _stages(page: dict[str, Any]) -> Table:
    table = _table("service", "stage", "state", "seconds", "detail")
    for service, details in page["details"].items():
        for stage in details["stages"]:
            state = stage["state"].lower()
            table.add_row(
                service,
                stage["name"],
                Text(state, style=STAGE_STYLES[state]),
                "" if state == "pending" else f"{stage['seconds']:.2f}",
                Text(one_line(stage["detail"])),
            )
        table.add_section()
    return table


def _links(links: list[dict[str, Any]]) -> Table:
    table = _table("link to", "state", "drafter", "p50", "p95", "features", "reason")
    for link in links:
        table.add_row(
            link["address"],
            link["state"],
            link["drafter"],
            f"{1000 * link['round_trip_p50_seconds']:.2f} ms",
            f"{1000 * link['round_trip_p95_seconds']:.2f} ms",
            _features(link),
            Text(
                "; ".join(one_line(link[field]) for field in ("alert", "reason") if link[field]),
                style="yellow" if link["alert"] else "",
            ),
        )
    return table


def _features(link: dict[str, Any]) -> str:
    """How features travel and, where they do, the layers that they are made of."""
    layer_ids = ", ".join(map(str, link["feature_layer_ids"]))
    return f"{link['feature_transport']} of {layer_ids}" if layer_ids else link["feature_transport"]


def _table(*columns: str) -> Table:
    """Only the last column, free text, is wrapped where the terminal is narrow."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in ("reason", "detail"), overflow="fold")
    return table
