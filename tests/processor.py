"""What this machine's processor can be tested with."""

import pytest

from outrider.engine.config import resolve_dtype
from outrider.engine.errors import ConfigError


def _has_bfloat16() -> bool:
    try:
        resolve_dtype("bfloat16")
    except ConfigError:
        return False
    return True


NEEDS_BFLOAT16 = pytest.mark.skipif(
    not _has_bfloat16(), reason="this processor has no bfloat16 products"
)
# Values of a test's parameter.
ENGINE_DTYPES = ["float32", pytest.param("bfloat16", marks=NEEDS_BFLOAT16)]
