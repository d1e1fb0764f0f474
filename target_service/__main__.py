"""`python -m target_service`: runs the target service."""

import sys

from outrider.serving.config import exit_with, parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import FaultInjector, parse_faults
from outrider.serving.threads import set_threads
from target_service.config import TargetConfig

PROGRAM = "python -m target_service"


def main() -> None:
    """Parses the configuration, sets the threads, and only then loads what imports torch."""
    try:
        config = parse_config(TargetConfig, PROGRAM, sys.argv[1:])
        faults = FaultInjector("target", parse_faults("target", config.inject_fault))
        set_threads(config.threads, config.spin_count)
        run(config, faults)
    except ConfigurationError as error:
        exit_with(error, PROGRAM)


def run(config: TargetConfig, faults: FaultInjector) -> None:
    """Runs the service until it is stopped or fails."""
    from outrider.engine.errors import EngineError
    from outrider.serving.lifecycle import Lifecycle, Timeouts
    from outrider.serving.server import configure_logging, run_service
    from outrider.serving.stages import ENGINE_STAGES
    from target_service.boot import Target
    from target_service.service import TargetService

    configure_logging("target", config.log_level)
    faults.announce()
    lifecycle: Lifecycle[Target] = Lifecycle(
        service="target",
        stages=ENGINE_STAGES,
        configuration=config.shown(),
        faults=faults,
        timeouts=Timeouts(
            stage_seconds=config.startup_timeout, activity_seconds=config.step_timeout
        ),
        expected_errors=(EngineError,),
    )
    run_service(TargetService(config, lifecycle), lifecycle, config, config.port)


if __name__ == "__main__":
    main()
