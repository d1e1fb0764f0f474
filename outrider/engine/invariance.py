"""Stage `attention`: is a row's result independent of the other rows, on this machine?"""

from outrider.engine.runner import Runner


def check_invariance(runner: Runner) -> str:
    return "x"
