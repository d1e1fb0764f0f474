"""`outrider up` over the fake services: the same plan and supervisor, other children."""

import os
import sys
from pathlib import Path

from fake_services import fake_kinds

from outrider.cli.cluster import ClusterOptions, plan_cluster
from outrider.cli.up import announce_and_wait, run_up

if __name__ == "__main__":
    log_directory = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    flags = {}
    if os.environ.pop("FAKE_HOLD", ""):
        flags["on_startup_failure"] = "hold"
    cluster = plan_cluster(
        ClusterOptions(host="127.0.0.1", rest_port=0, port=0, draft=None, flags=flags),
        fake_kinds(),
        own_variables=set(),
        environment=os.environ,
    )
    sys.exit(run_up(cluster, log_directory=log_directory, work=announce_and_wait))
