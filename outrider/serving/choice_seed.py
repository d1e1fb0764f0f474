"""The seeds of several answers to one request, so that each can be drawn again.

    seed of choice 0    the request's seed
    seed of choice i    mix(mix(seed ^ C) + i * C) modulo 2**64, C = 0xDB4F0B9175AE2165

with mix the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of i for each
seed, so that no two choices of a request share their noise.
"""

_MASK = 2**64 - 1
_CHOICE = 0xDB4F0B9175AE2165


def choice_seed(seed: int, choice: int) -> int:
    """The seed of answer number `choice`, below 2**64: the seed itself for choice 0."""
    assert choice >= 0, choice
    if choice == 0:
        return seed
    return _mix(_mix(seed ^ _CHOICE) + choice * _CHOICE)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
