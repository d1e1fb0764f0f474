"""What is known of a process besides its state: identity, configuration, what boot found."""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider import __file__ as package_file
from outrider import __version__
from outrider.v1 import status_pb2


@dataclass(slots=True, kw_only=True)
class Facts:
    """Not thread-safe: a Lifecycle owns it, under its lock."""

    service: str
    configuration: Mapping[str, str]
    boot_id: int = field(default_factory=lambda: secrets.randbits(64) or 1)
    started: float = field(default_factory=time.monotonic)
    model_fingerprint: str = ""
    device: str = ""
    limits: Mapping[str, str] = field(default_factory=dict)
    links: tuple[status_pb2.LinkStatus, ...] = ()
    # The GPU's figures now; None without a GPU.
    gpu: Callable[[], status_pb2.GpuFigures] | None = None

    def to_message(self) -> status_pb2.ServiceStatus:
        """A status without state, stages and failure."""
        return status_pb2.ServiceStatus(
            service=self.service,
            version=__version__,
            source_file=package_file or "",
            boot_id=self.boot_id,
            process_id=os.getpid(),
            uptime_seconds=time.monotonic() - self.started,
            configuration=self.configuration,
            model_fingerprint=self.model_fingerprint,
            device=self.device,
            limits=self.limits,
            links=self.links,
            gpu=None if self.gpu is None else self.gpu(),
        )
