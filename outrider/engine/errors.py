"""What the engine raises when input, configuration or hardware is at fault."""


class EngineError(Exception):
    """Any failure of the engine that is not a bug of the engine."""


class ConfigError(EngineError):
    """A configuration, or a checkpoint's own description of its model, cannot be served."""


class CheckpointError(EngineError):
    """A checkpoint's files or tensors are not what its configuration promises."""


class CacheFull(EngineError):
    """The block pool has fewer free blocks than were asked for."""


class StepError(EngineError):
    """A step asks for rows that the engine's limits do not allow."""


class InvarianceError(EngineError):
    """A row's result depends on the other rows of its step, on this machine."""
