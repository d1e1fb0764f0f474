"""Finds the GPU that a configuration names, with everything that computing on it needs."""

import importlib.util

import torch

from outrider.engine.errors import ConfigError

# bfloat16 matrix units, and the kernels of FlashInfer.
LEAST_CAPABILITY = (8, 0)
LIBRARIES = ("triton", "flashinfer")


def find_device(name: str) -> torch.device:
    """The device of a name `cuda` or `cuda:N`; raises ConfigError saying what is missing."""
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"device is {name!r}: the library {library} is not installed "
                "(pip install 'outrider[cuda]')"
            )
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "processors only"
        raise ConfigError(
            f"device is {name!r}: torch finds no NVIDIA GPU (torch {torch.__version__}, built for "
            f"{built_for})"
        )
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device is {name!r}: must be below cuda:{count}, the number of GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"device is {name!r}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}: must be at least 8.0"
        )
    return torch.device("cuda", index)
