"""What an Outrider server counted while a load ran; other servers count nothing that is read."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Since the server's start, or over a run."""

    drafts: float = 0.0
    accepted_tokens: float = 0.0
    speculative_steps: float = 0.0
    plain_steps: float = 0.0

    def since(self, before: "Counters") -> "Counters":
        """Of the time between."""
        return Counters(
            drafts=self.drafts - before.drafts,
            accepted_tokens=self.accepted_tokens - before.accepted_tokens,
            speculative_steps=self.speculative_steps - before.speculative_steps,
            plain_steps=self.plain_steps - before.plain_steps,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a verification, the target's own included; None without a draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def bypass_share(self) -> float | None:
        """Of the steps, those that verified no draft; None without a step."""
        steps = self.speculative_steps + self.plain_steps
        return self.plain_steps / steps if steps else None


async def read_counters(client: httpx.AsyncClient) -> Counters | None:
    """None where the server is none of ours."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    if response.status_code != httpx.codes.OK:
        return None
    values: dict[tuple[str, str], float] = {}
    try:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                values[sample.name, sample.labels.get("mode", "")] = sample.value
    except ValueError:
        return None
    if ("outrider_drafts_total", "") not in values:
        return None
    return Counters(
        drafts=values["outrider_drafts_total", ""],
        accepted_tokens=values.get(("outrider_accepted_tokens_total", ""), 0.0),
        speculative_steps=values.get(("outrider_steps_total", "speculative"), 0.0),
        plain_steps=values.get(("outrider_steps_total", "plain"), 0.0),
    )
