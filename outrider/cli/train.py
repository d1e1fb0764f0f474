"""`outrider train-eagle3`: hands its arguments to the package `training`, which needs torch."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

EXIT_CODE_OF_ERROR = 1


def train_eagle3(arguments: Sequence[str]) -> int:
    """Train an EAGLE-3 head; returns the exit status, 1 without torch.

    Raises SystemExit for `--help` and for wrong arguments, as argparse does.
    """
    if find_spec("torch") is None:
        print(
            "outrider train-eagle3: training needs torch: pip install 'outrider[train]'",
            file=sys.stderr,
        )
        return EXIT_CODE_OF_ERROR
    # Not at the top: the other commands start without torch.
    from training.train_eagle3 import main

    return main(arguments)
