"""Runs the draft service: `python -m draft_service --draft hybrid|eagle3|ngram|standalone`."""

import sys

from draft_service.config import DraftConfig
from outrider.serving.config import check_faults, exit_with, parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.threads import set_threads

PROGRAM = "python -m draft_service"


def main() -> None:
    """Never returns."""
    try:
        config = parse_config(DraftConfig, PROGRAM, sys.argv[1:])
        check_faults("draft", config)
    except ConfigurationError as error:
        exit_with(error, PROGRAM)
    # Before anything imports torch.
    set_threads(config.threads, config.spin_count)

    from draft_service.boot import boot_drafter
    from draft_service.service import DraftService, create_lifecycle
    from outrider.serving.server import configure_logging, run_service

    configure_logging("draft", config.log_level)
    lifecycle = create_lifecycle(config)
    service = DraftService(config=config, lifecycle=lifecycle, boot_drafter=boot_drafter)
    try:
        run_service(service, lifecycle, config, config.port)
    except ConfigurationError as error:
        exit_with(error, PROGRAM)


if __name__ == "__main__":
    main()
