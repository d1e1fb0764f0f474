"""The speculation policy of one target stream: what holds, and what it learns from."""

from collections.abc import Callable, Sequence

from gateway.controller import BucketView, Controller, StepSeen
from gateway.speculation import SpeculationPolicy
from gateway.step import SequenceStep
from outrider.v1 import target_pb2


class SpeculationInForce:
    """Belongs to the event loop. `send` takes a policy to the target, from its next step on."""

    def __init__(
        self,
        policy: SpeculationPolicy,
        controller: Controller | None,
        send: Callable[[target_pb2.SpeculationPolicy], None],
    ) -> None:
        """`controller`: None where the policy does not learn."""
        self._policy = policy
        self._controller = controller
        self._send = send
        self._override: SpeculationPolicy | None = None

    @property
    def policy(self) -> SpeculationPolicy:
        """What the target has been told."""
        if self._override is not None:
            return self._override
        return self._policy if self._controller is None else self._controller.policy

    @property
    def is_overridden(self) -> bool:
        """Something else holds than the configuration asks for."""
        return self._override is not None

    @property
    def max_decode_rows(self) -> int | None:
        """The hard bound, the same whatever holds."""
        return self._policy.max_decode_rows

    def observe(
        self, report: target_pb2.StepReport, steps: Sequence[tuple[int, SequenceStep]]
    ) -> None:
        """Learns from a step and tells the target where that changes the table."""
        if self._controller is None:
            return
        is_pure = report.prefill_tokens == 0
        # A sequence that ends its prompt emits a token as well, and no draft was asked for it.
        accepted = [step.accepted_length for _, step in steps] if is_pure else []
        is_new = self._controller.observe(
            StepSeen(
                decode_rows=report.decode_rows,
                draft_length=report.draft_length,
                seconds=report.step_seconds,
                is_pure=is_pure,
                accepted=accepted,
            )
        )
        if is_new and self._override is None:
            self._send(self._controller.policy.to_message())

    def override(self, policy: SpeculationPolicy) -> None:
        """This holds until `end_override`."""
        self._override = policy
        self._send(policy.to_message())

    def end_override(self) -> None:
        """What the configuration asks for holds again; nothing happens where it did."""
        if self._override is not None:
            self._override = None
            self._send(self.policy.to_message())

    def estimates(self) -> tuple[list[BucketView], list[float]]:
        """What was learned: by decode rows, and acceptance by position; empty where nothing is."""
        if self._controller is None:
            return [], []
        return self._controller.view(), self._controller.rates()
