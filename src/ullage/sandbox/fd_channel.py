"""Messages between two processes, each a line of JSON that may carry open files. It imports little for the guard."""

import _socket  # the module around it takes long to import
import json
import os
import struct
from typing import Any

from ullage.sandbox.protocol import encode

_MOST_FILES = 16
_SIZE = struct.calcsize("i")


class FdChannel:
    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(fileno=descriptor)
        self._buffer = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], files: list[int] | None = None) -> None:
        """Send a message and, with it, descriptors of open files."""
        rights = struct.pack(f"{len(files)}i", *files) if files else b""
        attached = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if files else []
        data = encode(message)
        self._socket.sendall(data[self._socket.sendmsg([data], attached) :])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and the files that came with it, or `None` if the other end is closed."""
        files: list[int] = []
        while b"\n" not in self._buffer:
            try:
                part, attached, _, _ = self._socket.recvmsg(1 << 16, _socket.CMSG_SPACE(_MOST_FILES * _SIZE))
            except ConnectionResetError:  # the other end was closed with unread messages
                return None
            for _, _, rights in attached:
                files += struct.unpack(f"{len(rights) // _SIZE}i", rights)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        for file in files:
            os.set_inheritable(file, False)
        return json.loads(line), files

    def close(self) -> None:
        self._socket.close()


def channel_pair() -> tuple[FdChannel, FdChannel]:
    return tuple(FdChannel(end.detach()) for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM))  # type: ignore
