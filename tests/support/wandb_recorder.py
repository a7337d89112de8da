"""A small local stand-in for the W&B server: answers what the real client sends while it records a run.

It keeps what arrives: the run as the client declared it, the rows of its history, its summary, uploaded files
and artifacts. Answers have the shape that the client's own query texts ask for. `down = True` closes every
connection unanswered, as a server that has gone away.
"""

import contextlib
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = "f" * 40  # has the form of a key and opens nothing


class StandIn(ThreadingHTTPServer):
    """Listens on a free port of this machine from construction until `close`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.down = False
        self.runs: dict[str, dict[str, Any]] = {}  # id -> variables of its upserts, merged
        self.streams: dict[tuple[str, str], dict[int, str]] = {}  # (run, file) -> line number -> line
        self.exit_codes: dict[str, int] = {}
        self.files: dict[str, bytes] = {}
        self.artifacts: dict[str, dict[str, Any]] = {}  # NAME:vN
        self.used: list[tuple[str, str]] = []  # run, artifact id
        self.unanswered: list[str] = []  # queries without an answer here
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """What points a client here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY, "WANDB_ERROR_REPORTING": "false"}

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()

    def history(self, run: str) -> list[dict[str, Any]]:
        """Rows in the order of their line numbers."""
        lines = self.streams.get((run, "wandb-history.jsonl"), {})
        return [json.loads(lines[number]) for number in sorted(lines)]

    def summary(self, run: str) -> dict[str, Any]:
        """The summary as last sent."""
        lines = self.streams.get((run, "wandb-summary.json"), {})
        return json.loads(lines[max(lines)]) if lines else {}

    def config(self, run: str) -> dict[str, Any]:
        """The configuration, without the client's own entry."""
        sent = json.loads(self.runs[run]["config"])
        return {key: entry["value"] for key, entry in sent.items() if key != "_wandb"}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The data of a GraphQL answer; None for a query that is not known here."""
        for name, method in _ANSWERS:
            if name in query:
                return method(self, variables)
        return None

    def _viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {"id": "V", "entity": "lab", "username": "lab", "flags": "{}", "teams": {"edges": []}}
        }

    def _features(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _resume(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        if run not in self.runs:
            return {"model": None}
        lines = self.streams.get((run, "wandb-history.jsonl"), {})
        tail = [lines[max(lines)]] if lines else []
        bucket = {
            "id": run,
            "name": run,
            "summaryMetrics": json.dumps(self.summary(run)),
            "displayName": self.runs[run].get("displayName"),
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": self.runs[run].get("config", "{}"),
            "tags": self.runs[run].get("tags") or [],
            "notes": None,
            "wandbConfig": "{}",
        }
        entity = {"id": "E", "name": "lab"}
        return {"model": {"id": "P", "name": "allattn", "entity": entity, "bucket": bucket}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        inserted = run not in self.runs
        known = self.runs.setdefault(run, {})
        known.update({key: value for key, value in variables.items() if value is not None})
        project = {"id": "P", "name": known["project"], "entity": {"id": "E", "name": "lab"}}
        bucket = {
            "id": run,
            "name": run,
            "displayName": known.get("displayName"),
            "description": None,
            "config": known.get("config", "{}"),
            "sweepName": None,
            "historyLineCount": 0,
            "project": project,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _run_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["run"]
        files = [{"name": f, "uploadUrl": f"{self.url}/upload/{run}/{f}"} for f in variables["files"]]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}

    def artifact(self, name: str) -> dict[str, Any] | None:
        """An artifact by NAME:vN or NAME:latest."""
        base, _, alias = name.rpartition(":")
        versions = [key for key in self.artifacts if key.rpartition(":")[0] == base]
        if not versions:
            return None
        return self.artifacts.get(versions[-1] if alias == "latest" else name)

    def _artifact_type(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = self.artifact(variables["name"])
        return {"project": {"artifact": known and {"artifactType": known["artifactType"]}}}

    def _create_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        wanted = variables["input"]
        name = (
            wanted["artifactCollectionName"]
            if "artifactCollectionName" in wanted
            else wanted["artifactCollectionNames"][0]
        )
        version = sum(key.rpartition(":")[0] == name for key in self.artifacts)
        project = {"id": "P", "internalId": "P", "name": wanted["projectName"], "entity": {"name": "lab"}}
        identity = f"artifact-{len(self.artifacts)}"
        self.artifacts[f"{name}:v{version}"] = {
            "__typename": "Artifact",
            "id": identity,
            "artifactSequence": {"__typename": "ArtifactSequence", "name": name, "project": project},
            "versionIndex": version,
            "artifactType": {"name": wanted["artifactTypeName"]},
            "description": None,
            "metadata": wanted.get("metadata"),
            "ttlDurationSeconds": -2,
            "ttlIsInherited": True,
            "tags": [],
            "historyStep": None,
            "state": "PENDING",
            "size": 0,
            "digest": wanted["digest"],
            "digestAlgorithm": "MANIFEST_MD5",
            "commitHash": None,
            "fileCount": 2,
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            "aliases": [
                {
                    "artifactCollection": {
                        "__typename": "ArtifactSequence",
                        "name": name,
                        "project": project,
                    },
                    "__typename": "ArtifactAlias",
                    "id": f"alias-{alias}",
                    "alias": alias,
                }
                for alias in ("latest", f"v{version}")
            ],
        }
        created = {"id": identity, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": created}}

    def _manifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.url}/manifest/{variables['artifactID']}"
        manifest = {"id": "M", "file": {"id": "F", "uploadUrl": url, "uploadHeaders": []}}
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def _artifact_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": f"{self.url}/artifact/{file['artifactID']}/{file['name']}",
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            for file in variables["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _commit(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = next(a for a in self.artifacts.values() if a["id"] == variables["artifactID"])
        artifact["state"] = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": artifact["id"], "digest": artifact["digest"]}}}

    def _use(self, variables: dict[str, Any]) -> dict[str, Any]:
        wanted = variables.get("input", variables)
        self.used.append((wanted["runName"], wanted["artifactID"]))
        return {"useArtifact": {"artifact": {"id": wanted["artifactID"]}}}

    def _file_urls(self, variables: dict[str, Any]) -> dict[str, Any]:
        identity = variables["id"]
        names = [entry["name"] for entry in variables["entries"]]
        edges = [
            {"node": {"name": name, "directUrl": f"{self.url}/artifact/{identity}/{name}"}} for name in names
        ]
        files = {"pageInfo": {"hasNextPage": False, "endCursor": None}, "edges": edges}
        return {"artifact": {"filesByManifestEntries": files}}

    def _manifest_url(self, variables: dict[str, Any]) -> dict[str, Any]:
        identity = variables.get("artifact_id") or variables["id"]
        return {"artifact": {"currentManifest": {"file": {"directUrl": f"{self.url}/manifest/{identity}"}}}}

    def _by_id(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"artifact": next((a for a in self.artifacts.values() if a["id"] == variables["id"]), None)}

    def _membership(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = self.artifact(variables["name"])
        membership = artifact and {
            "__typename": "ArtifactCollectionMembership",
            "id": f"membership-{artifact['id']}",
            "versionIndex": artifact["versionIndex"],
            "createdAt": artifact["createdAt"],
            "aliases": [
                {key: alias[key] for key in ("__typename", "id", "alias")} for alias in artifact["aliases"]
            ],
            "artifactCollection": artifact["artifactSequence"],
            "artifact": artifact,
        }
        return {"project": {"artifactCollectionMembership": membership}}

    def _download_urls(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = self.artifact(f"{variables['collection']}:{variables['alias']}")
        assert artifact is not None
        place = f"/artifact/{artifact['id']}/"
        nodes = [
            {"__typename": "File", "name": path.removeprefix(place), "directUrl": self.url + path}
            for path in self.files
            if path.startswith(place)
        ]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        files = {"pageInfo": page, "edges": [{"node": node} for node in nodes]}
        collection = {"__typename": "ArtifactSequence", "artifactMembership": {"files": files}}
        return {"project": {"artifactCollection": collection}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def handle(self) -> None:
        """A client that hangs up is not an event."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _gone(self) -> bool:
        if self.server.down:
            self.close_connection = True
            self.connection.close()
        return self.server.down

    def do_GET(self) -> None:
        """A file that was uploaded before."""
        if not self._gone():
            content = self.server.files.get(self.path)
            self._reply(content or b"{}", 200 if content is not None else 404)

    def do_PUT(self) -> None:
        """A file upload."""
        body = self._body()
        if not self._gone():
            self.server.files[self.path] = body
            self._reply(b"{}")

    def do_POST(self) -> None:
        """GraphQL, or a piece of a run's files."""
        body = self._body()
        if self._gone():
            return
        if self.path.startswith("/graphql"):
            request = json.loads(body)
            data = self.server.answer(request["query"], request.get("variables") or {})
            if data is None:
                self.server.unanswered.append(request["query"])
            self._reply(json.dumps({"data": data or {}}).encode())
        elif self.path.endswith("/file_stream"):
            run, sent = self.path.split("/")[-2], json.loads(body)
            for name, piece in (sent.get("files") or {}).items():
                lines = self.server.streams.setdefault((run, name), {})
                lines.update(enumerate(piece["content"], piece["offset"]))
            if sent.get("complete"):
                self.server.exit_codes[run] = sent.get("exitcode", 0)
            self._reply(b"{}")
        else:
            self._reply(b"{}")


_ANSWERS = [
    ("query ArtifactType(", StandIn._artifact_type),
    ("createArtifactManifest", StandIn._manifest),
    ("createArtifactFiles", StandIn._artifact_files),
    ("createArtifact(", StandIn._create_artifact),
    ("commitArtifact", StandIn._commit),
    ("useArtifact", StandIn._use),
    ("filesByManifestEntries", StandIn._file_urls),
    ("query ArtifactManifest", StandIn._manifest_url),
    ("query FetchArtifactManifest", StandIn._manifest_url),
    ("query GetArtifactMembershipFileUrls", StandIn._download_urls),
    ("query ArtifactByID", StandIn._by_id),
    ("query ArtifactMembershipByName", StandIn._membership),
    ("xxhashDigestsEnabled", lambda self, variables: {"entity": {"xxhashDigestsEnabled": False}}),
    ("coreWeaveOrganizationId", lambda self, variables: {"entity": {"organization": None}}),
    ("upsertBucket", StandIn._upsert),
    ("query RunResumeStatus", StandIn._resume),
    ("createRunFiles", StandIn._run_files),
    ("features", StandIn._features),
    ("viewer", StandIn._viewer),
]
