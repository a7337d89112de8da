"""A small local stand-in for W&B's API: it answers the queries that the wandb package sends, and no others.

The shapes of the answers follow the package's own query texts: `Runs`, `RunHistoryKeys`, `RunSampledHistory`
and `RunFullHistory` in wandb/apis/public/runs.py, `RunFiles` in files.py, `GetDefaultEntity` and
`GetProjects` in wandb/apis/_generated, and `Viewer`, `ServerFeaturesQuery`, `RunParquetHistory` and
`HistoryPage` in its wandb-core program (wandb 0.31); `ProjectInternalId` and `upsertView` in
wandb_workspaces/reports/v2/gql.py (0.4.13). Like the service it gives back only fields that are asked for,
pages its lists, hands history samples where samples are asked for, and knows only its own project.
"""

import io
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow
import pyarrow.parquet

JSON_STRINGS = (
    "config",
    "summaryMetrics",
    "systemMetrics",
)  # the schema's JSONString: text inside the answer


@dataclass
class StandInRun:
    """One run of the stand-in's project."""

    id: str
    config: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # as logged; `_step` is added where it lacks
    state: str = "finished"
    name: str | None = None
    group: str | None = None
    job_type: str = "prune"
    tags: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exported: int = 0  # so many first rows were exported to a file, as the service does with older rows

    def rows(self) -> list[dict[str, Any]]:
        """History with W&B's own row counter."""
        return [{"_step": number, **row} for number, row in enumerate(self.history)]

    def node(self, number: int) -> dict[str, Any]:
        """The run as the API's `Run` type."""
        config = {"_wandb": {"value": {}, "desc": None}}
        config |= {key: {"value": value, "desc": None} for key, value in self.config.items()}
        keys = sorted({key for row in self.history for key in row})
        return {
            "projectId": "7",
            "id": f"run-{number}",
            "name": self.id,
            "displayName": self.name or self.id,
            "sweepName": None,
            "tags": self.tags,
            "state": self.state,
            "group": self.group,
            "jobType": self.job_type,
            "commit": None,
            "readOnly": False,
            "createdAt": f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}Z",
            "heartbeatAt": "2026-01-02T00:00:00Z",
            "description": None,
            "notes": None,
            "historyLineCount": len(self.history),
            "user": {"name": "someone", "username": "someone"},
            "config": json.dumps(config),
            "summaryMetrics": json.dumps(self.summary),
            "systemMetrics": "{}",
            "historyKeys": {
                "lastStep": max((row["_step"] for row in self.rows()), default=-1),
                "keys": {key: {"typeCounts": [{"type": "number", "count": 1}]} for key in keys},
            },
        }


class StandIn:
    """The runs of one project, and what was asked."""

    def __init__(self, entity: str, project: str, runs: list[StandInRun]) -> None:
        self.entity, self.project, self.runs = entity, project, runs
        self.refuses_key = False
        self.address = ""
        self.reports: list[dict[str, Any]] = []  # views as they were put up
        self.operations: list[tuple[str, dict[str, Any]]] = []

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The GraphQL answer to one query.

        Raises:
            KeyError: the operation is not one of those that the comparison needs.
        """
        found = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
        operation = found.group(1) if found else ""
        self.operations.append((operation, variables))
        if operation == "Viewer":
            viewer = {"id": "u1", "entity": self.entity, "username": self.entity, "email": "", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "GetDefaultEntity":
            return {"viewer": {"id": "u1", "entity": self.entity}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "GetProjects":
            return {"models": self._projects()}
        if operation == "ProjectInternalId":
            known = (variables["entityName"], variables["projectName"]) == (self.entity, self.project)
            return {"project": {"id": "P", "internalId": "7"} if known else None}
        if operation == "upsertView":
            return {"upsertView": self._upsert_view(variables)}
        answers = {
            "Runs": self._runs,
            "Run": self._run,
            "RunFiles": self._files,
            "RunHistoryKeys": self._run,
            "RunParquetHistory": self._exported,
            "HistoryPage": self._page,
            "RunFullHistory": self._full_history,
            "RunSampledHistory": self._sampled,
        }
        answer = answers[operation]
        if (variables.get("entity"), variables.get("project")) != (self.entity, self.project):
            return {"project": None}
        return {"project": answer(query, variables)}

    def _projects(self) -> dict[str, Any]:
        project = {
            "__typename": "Project",
            "id": "P",
            "name": self.project,
            "entityName": self.entity,
            "createdAt": "2026-01-01T00:00:00Z",
            "isBenchmark": False,
            "user": None,
        }
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"pageInfo": page, "edges": [{"node": project}]}

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A report; its specification must be JSON."""
        self.reports.append(variables | {"spec": json.loads(variables["spec"])})
        project = {"id": "P", "name": variables["projectName"], "entityName": variables["entityName"]}
        told = ("type", "name", "displayName", "description", "spec")
        view = {"id": "Vmlldzox", "project": project, "updatedAt": "2026-01-02T00:00:00Z"}
        return {"view": view | {name: variables[name] for name in told}, "inserted": True}

    def _runs(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        filters = json.loads(variables.get("filters") or "{}")
        assert set(filters) <= {"group", "jobType"}, filters
        names = {"group": "group", "jobType": "job_type"}
        matching = [
            (number, run)
            for number, run in enumerate(self.runs)
            if all(getattr(run, names[key]) == value for key, value in filters.items())
        ]
        assert variables["order"] == "+created_at"
        start, size = int(variables.get("cursor") or 0), variables["perPage"]
        page = matching[start : start + size]
        edges = [
            {"node": _asked(run.node(number), query), "cursor": str(start + place + 1)}
            for place, (number, run) in enumerate(page)
        ]
        end = {"endCursor": str(start + len(page)), "hasNextPage": start + len(page) < len(matching)}
        return {
            "internalId": "7",
            "runCount": len(matching),
            "readOnly": False,
            "runs": {"edges": edges, "pageInfo": end},
        }

    def _run(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        for number, run in enumerate(self.runs):
            if run.id == variables["name"]:
                return {"run": _asked(run.node(number), query)}
        return {"run": None}

    def _files(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Those of the files asked for that the run has."""
        run = self._named(variables["name"])
        edges = [
            {
                "node": {
                    "id": name,
                    "name": name,
                    "url": f"{self.address}/files/{run.id}/{name}",
                    "directUrl": f"{self.address}/files/{run.id}/{name}",
                    "sizeBytes": len(run.files[name]),
                    "mimetype": "application/json",
                    "updatedAt": "2026-01-02T00:00:00Z",
                    "md5": None,
                },
                "cursor": name,
            }
            for name in variables["fileNames"]
            if name in run.files
        ]
        page = {"endCursor": None, "hasNextPage": False}
        return {
            "internalId": "7",
            "run": {"fileCount": len(edges), "files": {"edges": edges, "pageInfo": page}},
        }

    def file(self, path: str) -> bytes:
        """The content at an address of this server.

        Raises:
            KeyError, StopIteration: there is none.
        """
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "exported":
            return self.exported_file(path)
        run, _, name = rest.partition("/")
        return self._named(run).files[name]

    def _exported(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Where exported rows lie, and of the others the keys asked for; those are read page by page."""
        run = self._named(variables["runName"])
        urls = [f"{self.address}/exported/{run.id}.parquet"] if run.exported else []
        live = [{key: row[key] for key in variables["liveKeys"]} for row in run.rows()[run.exported :]]
        return {"run": {"parquetHistory": {"parquetUrls": urls, "liveData": live}}}

    def exported_file(self, path: str) -> bytes:
        """The exported rows of a run as a Parquet file."""
        run = self._named(path.removeprefix("/exported/").removesuffix(".parquet"))
        file = io.BytesIO()
        rows = run.rows()[: run.exported]
        columns = {name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}}
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        return file.getvalue()

    def _named(self, run_id: str) -> StandInRun:
        return next(run for run in self.runs if run.id == run_id)

    def _page(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        first, end = int(variables["minStep"]), int(variables["maxStep"])
        rows = [row for row in self._history(variables["run"]) if first <= row["_step"] < end]
        return {"run": {"history": [json.dumps(row) for row in _sample(rows, variables["pageSize"])]}}

    def _full_history(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        rows = _sample(self._history(variables["name"]), variables["samples"])
        return {"run": {"history": [json.dumps(row) for row in rows]}}

    def _sampled(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = []
        for text in variables["specs"]:
            spec = json.loads(text)
            rows = [
                {key: row[key] for key in spec["keys"]}
                for row in self._history(variables["name"])
                if all(key in row for key in spec["keys"])
            ]
            found.append(_sample(rows, spec["samples"]))
        return {"run": {"sampledHistory": found}}

    def _history(self, run_id: str) -> list[dict[str, Any]]:
        return self._named(run_id).rows()


def _asked(node: dict[str, Any], query: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if re.search(rf"\b{key}\b", query)}


def _sample(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """At most `size` rows, others at each call."""
    if len(rows) <= size:
        return rows
    return [rows[place] for place in sorted(random.sample(range(len(rows)), size))]


@contextmanager
def serve(stand_in: StandIn) -> Iterator[str]:
    """Serve the stand-in on a free local port; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/graphql":
                return self._reply(404, {"error": self.path})
            if stand_in.refuses_key:
                return self._reply(401, {"errors": [{"message": "user is not logged in"}]})
            asked = json.loads(body)
            try:
                reply = {"data": stand_in.answer(asked["query"], asked.get("variables") or {})}
            except KeyError as error:
                reply = {"data": None, "errors": [{"message": f"not answered here: {error}"}]}
            self._reply(200, reply)

        def do_GET(self) -> None:
            try:
                content = stand_in.file(self.path)
            except (KeyError, StopIteration):
                return self._reply(404, {"error": self.path})
            self._send(200, "application/octet-stream", content)

        do_HEAD = do_GET

        def _reply(self, status: int, reply: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(reply).encode())

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        stand_in.address = f"http://127.0.0.1:{server.server_port}"
        yield stand_in.address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
