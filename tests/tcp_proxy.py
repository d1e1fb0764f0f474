"""A TCP proxy on loopback that cuts, holds back, slows down and spoils what goes through it, in
either direction or both.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

PIECE_BYTES = 2**16
LOOK_SECONDS = 0.005


class Way(Enum):
    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


BOTH_WAYS = tuple(Way)


@dataclass
class _Conditions:
    """Of one way. Written by the test's thread, read by the proxy's."""

    is_held: bool = False
    bytes_per_second: float | None = None
    # One bit of one byte in so many is flipped; 0: of none.
    flips_one_in: int = 0
    num_bytes: int = 0


@dataclass(eq=False)
class TcpProxy:
    """One listener, any number of connections. Methods are for the test's thread."""

    server_port: int
    loop: asyncio.AbstractEventLoop
    port: int = 0
    _conditions: dict[Way, _Conditions] = field(
        default_factory=lambda: {way: _Conditions() for way in Way}
    )
    _refuses: bool = False
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def bytes_seen(self, way: Way) -> int:
        return self._conditions[way].num_bytes

    def cut(self) -> None:
        """Resets all connections; new ones are closed at once until `heal`."""
        self._refuses = True
        done = threading.Event()

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()
            done.set()

        self.loop.call_soon_threadsafe(abort)
        assert done.wait(10)

    def hold(self, *ways: Way) -> None:
        """Nothing comes through any more, and nobody is told."""
        for way in ways:
            self._conditions[way].is_held = True

    def throttle(self, bytes_per_second: float) -> None:
        for way in Way:
            self._conditions[way].bytes_per_second = bytes_per_second

    def spoil(self, one_in: int) -> None:
        """Flips a bit in one of so many bytes, both ways."""
        for way in Way:
            self._conditions[way].flips_one_in = one_in

    def heal(self) -> None:
        """From now on all is well; what was held back follows."""
        self._refuses = False
        for way in Way:
            self._conditions[way].is_held = False
            self._conditions[way].bytes_per_second = None
            self._conditions[way].flips_one_in = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            to_server = await asyncio.open_connection("127.0.0.1", self.server_port)
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, to_server[1]}
        self._writers |= writers
        pumps = [
            asyncio.ensure_future(self._pump(reader, to_server[1], Way.TO_SERVER)),
            asyncio.ensure_future(self._pump(to_server[0], writer, Way.TO_CLIENT)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in writers:
                each.transport.abort()
            self._writers -= writers

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        conditions = self._conditions[way]
        with suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                rate = conditions.bytes_per_second
                if rate is not None:
                    await asyncio.sleep(len(piece) / rate)
                while conditions.is_held:
                    await asyncio.sleep(LOOK_SECONDS)
                writer.write(_spoiled(piece, conditions))
                conditions.num_bytes += len(piece)
                await writer.drain()


def _spoiled(piece: bytes, conditions: _Conditions) -> bytes:
    one_in = conditions.flips_one_in
    if not one_in:
        return piece
    spoiled = bytearray(piece)
    for at in range(-conditions.num_bytes % one_in, len(piece), one_in):
        spoiled[at] ^= 1 << at % 8
    return bytes(spoiled)


@contextmanager
def tcp_proxies() -> Iterator[Callable[[int], TcpProxy]]:
    """Makes proxies in front of ports, all in one thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[asyncio.Server] = []

    async def start(proxy: TcpProxy) -> None:
        servers.append(await asyncio.start_server(proxy.serve, "127.0.0.1", 0))
        proxy.port = servers[-1].sockets[0].getsockname()[1]

    def make(server_port: int) -> TcpProxy:
        proxy = TcpProxy(server_port=server_port, loop=loop)
        asyncio.run_coroutine_threadsafe(start(proxy), loop).result(10)
        return proxy

    async def stop() -> None:
        for server in servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield make
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
