"""Generates the stubs in `outrider/v1` from the `.proto` files beside this script.

Path, protobuf package and Python import are the same, so that nothing has to be rewritten. Run
with the oldest grpcio-tools that the project supports: newer runtimes load older stubs, not the
reverse.
"""

import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

OLDEST_GRPCIO_TOOLS = "1.76.0"
PROTO_ROOT = Path(__file__).resolve().parent


def main() -> int:
    if version("grpcio-tools") != OLDEST_GRPCIO_TOOLS:
        print(
            f"grpcio-tools {version('grpcio-tools')} is installed, "
            f"{OLDEST_GRPCIO_TOOLS} is needed to generate the stubs",
            file=sys.stderr,
        )
        return 2
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    output = PROTO_ROOT.parent
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{PROTO_ROOT}",
                f"-I{files('grpc_tools') / '_proto'}",
                f"--python_out={output}",
                f"--pyi_out={output}",
                f"--grpc_python_out={output}",
                *sources,
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
