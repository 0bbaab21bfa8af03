"""A small Hub on loopback for the real huggingface_hub client: repositories, commits, downloads.

It speaks of the Hub's protocol what publishing and loading a small model need, and keeps its state as files. What it
refuses it refuses as the Hub does, by status and X-Error-Code; [`HubServer`] lists the faults that can be ordered besides.
"""

import base64
import json
import re
import socket
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from hub_repository import ACCOUNTS, RefusalError, Repository

ID = r"(?P<id>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"


class HubServer:
    """The server, in threads of this process.

    Attributes:
        url: for HF_ENDPOINT.
        requests: `METHOD path` of all that was asked.
        refuse: `(pattern of METHOD path, status)` of requests that are refused.
    """

    def __init__(self, root: Path):
        self.root, self.lock, self.connections = root, threading.Lock(), []
        self.reset()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def reset(self) -> None:
        """Forgets what was asked and ends all faults; the repositories stay."""
        self.requests: list[str] = []
        self.refuse: list[tuple[str, int]] = []

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:  # a client keeps some for its next request
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def has(self, repo_id: str) -> bool:
        return (self.root / repo_id / "repo.json").is_file()

    def repository(self, repo_id: str) -> Repository:
        if not self.has(repo_id):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        return Repository(self.root / repo_id)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed, or gave up
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.hub.connections.append(self.connection)

    def log_message(self, *args):
        pass

    def answer(self) -> None:
        hub, path = self.server.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        try:
            self.body = self.read_body()
            for pattern, status in hub.refuse:
                if re.search(pattern, f"{self.command} {path}"):
                    raise RefusalError(status, "refused by order")
            for method, pattern, function in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and self.command in method.split():
                    arguments = {name: unquote(value or "") for name, value in found.groupdict().items()}
                    with hub.lock:
                        self.send(*function(self, **arguments))
                    return
            raise RefusalError(404, f"no such address: {path}")
        except RefusalError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.content["error"]}
            self.send(refusal.content, {name: value for name, value in headers.items() if value}, refusal.status)

    do_GET = do_HEAD = do_POST = answer

    def send(self, content=None, headers=None, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    # --- who asks -------------------------------------------------------------------------------------------------

    @property
    def account(self) -> tuple[str, str] | None:
        given = self.headers.get("Authorization", "")
        if given and given.removeprefix("Bearer ") not in ACCOUNTS:
            raise RefusalError(401, "Invalid credentials in Authorization header")
        return ACCOUNTS.get(given.removeprefix("Bearer "))

    def readable(self, repo_id: str) -> Repository:
        repository, account = self.server.hub.repository(repo_id), self.account
        if repository.state["private"] and (account is None or repo_id.split("/")[0] != account[0]):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, repo_id: str) -> Repository:
        self.check_writer(repo_id.split("/")[0])
        return self.readable(repo_id)

    def check_writer(self, owner: str) -> None:
        if self.account is None:
            raise RefusalError(401, "Invalid username or password.")
        name, role = self.account
        if role != "write" or owner != name:
            raise RefusalError(403, f"You don't have the rights to write for {owner}")

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    # --- what is asked --------------------------------------------------------------------------------------------

    def whoami(self):
        if self.account is None:
            raise RefusalError(401, "Invalid username or password.")
        name, role = self.account
        content = {"type": "user", "name": name, "orgs": []}
        return (content | {"auth": {"accessToken": {"displayName": "test", "role": role}}},)

    def create(self):
        given = self.json()
        repo_id = f"{given.get('organization') or (self.account or ('',))[0]}/{given['name']}"
        self.check_writer(repo_id.split("/")[0])
        address = f"{self.server.hub.url}/{repo_id}"
        if self.server.hub.has(repo_id):
            raise RefusalError(409, "You already created this model repo", url=address)
        Repository.create(self.server.hub.root / repo_id, given.get("visibility") == "private" or bool(given.get("private")))
        return ({"url": address, "name": repo_id},)

    def validate(self):
        """The structure of the metadata that the Hub insists on."""
        match = re.match(r"---\n(.*?)\n---\n", self.json()["content"], re.DOTALL)
        data, errors = yaml.safe_load(match[1]) if match else {}, []
        for result in (result for model in data.get("model-index", []) for result in model["results"]):
            wanted = [(result.get("task", {}), {"type"}), (result.get("dataset", {}), {"type", "name"})]
            wanted += [(metric, {"type", "value"}) for metric in result.get("metrics", [{}])]
            errors += [{"message": f"{names - found.keys()} missing"} for found, names in wanted if names - found.keys()]
        if errors:
            raise RefusalError(400, "Invalid metadata", errors=errors)
        return ({"errors": [], "warnings": []},)

    def info(self, id, revision="main"):
        repository = self.readable(id)
        content = {"id": id, "private": repository.state["private"], "sha": repository.find(revision or "main")}
        return (content | {"siblings": [{"rfilename": path} for path in repository.files(revision or "main")]},)

    def tree(self, id, revision, path=""):
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        return (self.readable(id).listing(revision, path, recursive),)

    def preupload(self, id, revision):
        repository, answers = self.writable(id), []
        known = repository.files(revision)
        for file in self.json()["files"]:
            answers.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False})
            answers[-1] |= {"oid": known[file["path"]]["oid"]} if file["path"] in known else {}
        return ({"files": answers},)

    def commit(self, id, revision):
        repository = self.writable(id)
        files, title, head = dict(repository.files(revision)), "", repository.state["heads"].get(revision)
        for operation in map(json.loads, self.body.decode().splitlines()):
            kind, value = operation["key"], operation["value"]
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, head):
                    raise RefusalError(412, "A commit has happened since.")
            elif kind == "file":
                files[value["path"]] = repository.keep(base64.b64decode(value["content"]))
            elif kind == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise RefusalError(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise RefusalError(400, f"unknown operation {kind}")
        oid = repository.commit(revision, title, files)
        return ({"success": True, "commitOid": oid, "commitUrl": f"{self.server.hub.url}/{id}/commit/{oid}"},)

    def resolve(self, id, revision, path):
        repository = self.readable(id)
        headers = {"X-Repo-Commit": repository.find(revision)}
        entry = repository.files(revision).get(path)
        if entry is None:
            return {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"}, 404
        headers |= {"ETag": f'"{entry["oid"]}"', "Content-Type": "application/octet-stream"}
        return repository.read(path, revision), headers


ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", f"/api/models/{ID}(/revision/{REVISION})?", Handler.info),
    ("GET", f"/api/models/{ID}/tree/{REVISION}(/(?P<path>.+))?", Handler.tree),
    ("POST", f"/api/models/{ID}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/api/models/{ID}/commit/{REVISION}", Handler.commit),
    ("GET HEAD", f"/{ID}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]
