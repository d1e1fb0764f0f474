"""`python -m gateway`: runs the gateway."""

import sys

from gateway.canary import CanaryFailed
from gateway.config import GatewayConfig
from gateway.generator import Gateway
from gateway.model import ModelMismatch
from gateway.service import GatewayService
from outrider.serving.config import exit_with, parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import FaultInjector, parse_faults
from outrider.serving.lifecycle import Lifecycle, Timeouts
from outrider.serving.server import configure_logging, run_service
from outrider.serving.stages import GATEWAY_STAGES

PROGRAM = "python -m gateway"


def main() -> None:
    """Never returns."""
    try:
        config = parse_config(GatewayConfig, PROGRAM, sys.argv[1:])
        configure_logging("gateway", config.log_level)
        faults = FaultInjector("gateway", parse_faults("gateway", config.inject_fault))
        faults.announce()
        lifecycle: Lifecycle[Gateway] = Lifecycle(
            service="gateway",
            stages=GATEWAY_STAGES,
            configuration=config.shown(),
            faults=faults,
            timeouts=Timeouts(
                stage_seconds=config.startup_timeout, activity_seconds=config.step_timeout
            ),
            expected_errors=(ModelMismatch, CanaryFailed),
        )
        service = GatewayService(config, lifecycle)
        run_service(service, lifecycle, config, config.port, service.interceptors)
    except ConfigurationError as error:
        exit_with(error, PROGRAM)


if __name__ == "__main__":
    main()
