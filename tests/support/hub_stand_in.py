"""A small local stand-in for the Hugging Face hub: repositories of one commit, in memory.

It answers what huggingface_hub sends for `create_repo`, `create_commit` with files inside the commit (the
answer `regular` to the question how to upload), `repo_info`, the list of files and downloads; nothing else.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 34  # has the form of a token and opens nothing
SHA = "a" * 40  # of every commit


@dataclass
class Hub:
    """What was put up, and what was asked for and not answered."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # ORG/NAME -> path -> content
    unanswered: list[str] = field(default_factory=list)

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            return self._about(found[1])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            tree = [_entry(name, content) for name, content in self.files.get(found[1], {}).items()]
            return 200, {}, json.dumps(tree).encode()
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/[^/]+/.+", path):  # there are no folders
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.files.get(found[1], {}).get(found[2])
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}, b""
            return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": SHA}, content
        self.unanswered.append(f"GET {path}")
        return 404, {}, b"{}"

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.files.setdefault(name, {})
            return 200, {}, json.dumps({"url": f"{self.address}/{name}", "name": name}).encode()
        if path == "/api/validate-yaml":
            return 200, {}, json.dumps({"errors": [], "warnings": []}).encode()
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/[^/]+", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return 200, {}, json.dumps({"files": modes}).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path):
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    content = base64.b64decode(part["value"]["content"])
                    self.files[found[1]][part["value"]["path"]] = content
            url = f"{self.address}/{found[1]}/commit/{SHA}"
            return 200, {}, json.dumps({"commitUrl": url, "commitOid": SHA}).encode()
        self.unanswered.append(f"POST {path}")
        return 404, {}, b"{}"

    def _about(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if name not in self.files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        about: dict[str, Any] = {"_id": "1", "id": name, "modelId": name, "sha": SHA, "tags": []}
        about |= {"private": False, "downloads": 0, "likes": 0}
        about["siblings"] = [{"rfilename": path} for path in self.files[name]]
        return 200, {}, json.dumps(about).encode()


def _oid(content: bytes) -> str:
    """Of a file, as git has it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}


@contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """Serve the hub on a free local port; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(*hub.get(unquote(urlsplit(self.path).path)))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(*hub.post(unquote(urlsplit(self.path).path), body))

        def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        yield hub.address
    finally:
        server.shutdown()
        server.server_close()
