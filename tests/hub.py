"""A server on this machine that speaks the protocol of the Hugging Face hub, for the hub's own library to ask.

    with Hub({"org/tiny": {"config.json": b"{}"}}) as hub:
        use(monkeypatch, hub.address, tmp_path)

It knows what `huggingface_hub` needs to download: what a file is (HEAD, with its ETag and the commit), the file or a
range of it, the list of a repository's files, and repositories that are gated or do not exist.
"""

import hashlib
import json
import math
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def checkpoint(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> bytes:
    """A file of safetensors: its header, and zeros."""
    name, size = TYPES[dtype]
    header, end = {}, 0
    for key, shape in shapes.items():
        begin, end = end, end + size * math.prod(shape)
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def use(monkeypatch, address: str, folder: Path) -> None:
    """Let the hub's library ask this address and keep files in this folder. It read its variables on import."""
    from huggingface_hub import constants

    url = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_CACHE": str(folder)}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


class Hub:
    """The server; `sent` has what it was asked for and how many bytes it gave, in order."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], gated: tuple[str, ...] = ()) -> None:
        self.repositories, self.gated = repositories, gated
        self.sent: list[tuple[str, str, int]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bytes_of(self, ending: str) -> int:
        """How many bytes of files whose name ends so were sent."""
        return sum(count for _, path, count in self.sent if path.endswith(ending))


class _Answer(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            self._list(path.removeprefix("api/models/"))
            return
        name, _, rest = path.partition("/resolve/")
        files = self._repository(name)
        if files is None:
            return
        revision, _, file = rest.partition("/")
        if revision not in ("main", COMMIT):
            self._give(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif file not in files:
            self._give(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self._file(files[file])

    def _repository(self, name: str) -> dict[str, bytes] | None:
        if name in self.hub.gated and self.headers.get("Authorization") != "Bearer accepted":
            self._give(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif name not in self.hub.repositories:
            self._give(401, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            return self.hub.repositories[name]
        return None

    def _file(self, content: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            self._give(200, content, headers)
            return
        first, _, last = wanted.partition("-")
        begin, end = int(first), min(int(last or len(content)) + 1, len(content))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._give(206, content[begin:end], headers)

    def _list(self, path: str) -> None:
        name, _, rest = path.partition("/tree/") if "/tree/" in path else path.partition("/revision/")
        files = self._repository(name)
        if files is None:
            return
        if "/tree/" in path:
            found = [{"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in files.items()]
            self._give(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
            return
        about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files], "tags": []}
        self._give(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _give(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        given = 0 if self.command == "HEAD" else len(content)
        self.hub.sent.append((self.command, self.path.partition("?")[0], given))
        if given:
            self.wfile.write(content)
