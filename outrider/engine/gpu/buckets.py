"""Numbers of sequences that graphs are captured for: a step takes the next larger one."""

_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def sequence_buckets(most: int) -> list[int]:
    """Ascending, up to `most`, which is one of them."""
    return [*(count for count in _COUNTS if count < most), most]
