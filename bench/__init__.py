"""Measurements: scripts that print the figures of docs/measurements.md."""
