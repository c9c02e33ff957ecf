"""A Redis of the world: the commands that the selection store's client sends, answered as a Redis does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from experiments.faults.sockets import Socket
from experiments.faults.world import Host, World, WorldProcess, WorldThread

PORT = 6379
_FULL = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
_READING = b"-LOADING Redis is loading the dataset in memory\r\n"
_Commands = list[list[str]]


@dataclass
class RedisPlace:
    """What the server keeps, also while none runs, and what is wrong with it."""

    world: World
    host: Host
    url: str
    strings: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Until then it takes nothing new, and until then it reads its file and answers no client.
    full_until_ns: int = 0
    reading_until_ns: int = 0
    #: How often it came back without what it had.
    num_lost: int = 0

    def forget(self) -> None:
        """Lose everything, as one that keeps nothing on a disk does with its process."""
        self.strings.clear()
        self.hashes.clear()
        self.num_lost += 1

    def start(self, name: str) -> WorldProcess:
        """Start the server."""
        process = WorldProcess(self.world, self.host, name)

        async def main() -> None:
            loop = process.loop
            listening = Socket()
            listening.bind(("", PORT))
            listening.listen()

            def accept() -> None:
                sock, _ = listening.accept()
                WorldThread(process, _Session(self, sock).run).start()

            loop.add_reader(listening, accept)
            await loop.create_future()

        process.start(main)
        return process

    def answer(self, command: list[str]) -> bytes:
        """Do what a command says."""
        name, *words = command
        name = name.upper()
        if self.world.now_ns < self.reading_until_ns:
            return _READING
        if name in _WRITING and self.world.now_ns < self.full_until_ns:
            return _FULL
        return _encoded(self._do(name, *words))

    def _do(self, name: str, key: str = "", *words: str) -> object:
        values = self.hashes.get(key, {})
        match name:
            case "SETNX":
                (value,) = words
                is_new = key not in self.strings
                self.strings.setdefault(key, value)
                return int(is_new)
            case "GET":
                return self.strings.get(key)
            case "HSET":
                self.hashes[key] = values | dict(zip(words[::2], words[1::2], strict=True))
                return len(self.hashes[key]) - len(values)
            case "HGET":
                (column,) = words
                return values.get(column)
            case "HDEL":
                (column,) = words
                return int(values.pop(column, None) is not None)
            case "HGETALL":
                return values
            case "UNLINK":
                return int(self.hashes.pop(key, None) is not None)
        raise AssertionError(f"a client sends {name}, which this Redis does not know")


# A full one takes none of these, also where nothing would be new.
_WRITING = frozenset({"SETNX", "HSET"})


class _Session:
    """A connection of the server's."""

    def __init__(self, place: RedisPlace, sock: Socket) -> None:
        self._place, self._socket = place, sock
        #: Commands since MULTI; None: each is done as it comes.
        self._queued: _Commands | None = None
        self._is_spoiled = False

    def run(self) -> None:
        """Answer until the client is gone."""
        try:
            for command in self._commands():
                self._socket.sendall(self._answer(command))
        except OSError:
            pass
        self._socket.close()

    def _commands(self) -> Iterator[list[str]]:
        received = bytearray()
        while data := self._socket.recv(65536):
            received += data
            while (command := _taken(received)) is not None:
                yield command

    def _answer(self, command: list[str]) -> bytes:
        place, name = self._place, command[0].upper()
        if name == "HELLO":  # The third version of the protocol, which clients ask for.
            return _encoded({"server": "redis", "version": "7.0.15", "proto": 3})
        if name == "CLIENT":
            return b"+OK\r\n"
        if name == "MULTI":
            self._queued, self._is_spoiled = [], False
            return b"+OK\r\n"
        if self._queued is None:
            return place.answer(command)
        if name == "EXEC":
            queued, self._queued = self._queued, None
            if self._is_spoiled:
                return b"-EXECABORT Transaction discarded because of previous errors.\r\n"
            return b"*%d\r\n" % len(queued) + b"".join(map(place.answer, queued))
        now_ns = place.world.now_ns
        if now_ns < place.reading_until_ns or (now_ns < place.full_until_ns and name in _WRITING):
            self._is_spoiled = True
            return _FULL if now_ns >= place.reading_until_ns else _READING
        self._queued.append(command)
        return b"+QUEUED\r\n"


def _taken(received: bytearray) -> list[str] | None:
    """Take a command off what was received; None: it is not whole."""
    lines = received.split(b"\r\n", 1)
    if len(lines) < 2:
        return None
    at, words = len(lines[0]) + 2, []
    for _ in range(int(lines[0][1:])):
        end = received.find(b"\r\n", at)
        if end < 0:
            return None
        length = int(received[at + 1 : end])
        at = end + 2 + length + 2
        if at > len(received):
            return None
        words.append(received[end + 2 : end + 2 + length].decode())
    del received[:at]
    return words


def _encoded(answer: object) -> bytes:
    if answer is None:
        return b"_\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, Mapping):
        words = [_encoded(word) for pair in answer.items() for word in pair]
        return b"%%%d\r\n" % len(answer) + b"".join(words)
    data = str(answer).encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)
