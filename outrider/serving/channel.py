"""Channels between the services."""

import grpc

# Prompts and, later, features of a whole prompt travel in one message.
MAX_MESSAGE_BYTES = 64 * 2**20

# Local proxies are for web traffic, never for a link between services.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Every link has its own connection: a shared one would make one link wait behind another's
    # bytes.
    ("grpc.use_local_subchannel_pool", 1),
    # The peers are few and known: a service that comes back is found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 150),
    # Not a pause: how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5000),
)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two processes on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    server_name: str = "",
) -> grpc.aio.Channel:
    """An asyncio channel to host:port, in plain text without credentials. A peer that is not
    trusted may send less at once. `server_name`: whose certificate it must be, if not the host's.
    """
    options = _options(max_receive_bytes, server_name)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str = ""
) -> grpc.Channel:
    """The same for callers without an event loop."""
    options = _options(MAX_MESSAGE_BYTES, server_name)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _options(max_receive_bytes: int, server_name: str) -> tuple[tuple[str, str | int], ...]:
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return (("grpc.max_receive_message_length", max_receive_bytes), *_CHANNEL_OPTIONS, *named)
