"""Outrider: speculative decoding for large language models as three gRPC microservices."""

from importlib.metadata import version

__version__ = version("outrider")
