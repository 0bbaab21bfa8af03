"""A small Hub on loopback for the real huggingface_hub client: repositories, commits, downloads.

It speaks of the Hub's protocol what publishing and loading a small model need. What it refuses it
refuses as the Hub does, by status and X-Error-Code.
"""

import base64
import json
import re
import threading
import time
from pathlib import Path

import uvicorn
import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from hub_repository import ACCOUNTS, RefusalError, Repository

MODEL = "/api/models/{owner}/{name}"


class HubServer:
    """The server, in a thread of this process.

    Attributes:
        url: for HF_ENDPOINT.
        refuse: `(pattern of METHOD path, status)` of requests that are refused.
    """

    def __init__(self, root: Path):
        self.root, self.refuse = root, []
        self._server = uvicorn.Server(uvicorn.Config(application(self), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Ends what was ordered; the repositories stay."""
        self.refuse = []

    def stop(self) -> None:
        # a client keeps connections for its next request
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def has(self, repo_id: str) -> bool:
        return (self.root / repo_id / "repo.json").is_file()

    def repository(self, repo_id: str) -> Repository:
        if not self.has(repo_id):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        return Repository(self.root / repo_id)

    def readable(self, repo_id: str, request: Request) -> Repository:
        repository, account = self.repository(repo_id), account_of(request)
        if repository.state["private"] and (account is None or repo_id.split("/")[0] != account[0]):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        return repository


def account_of(request: Request) -> tuple[str, str] | None:
    """Name and role of who asks."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token and token not in ACCOUNTS:
        raise RefusalError(401, "Invalid credentials in Authorization header")
    return ACCOUNTS.get(token)


def check_writer(owner: str, request: Request) -> None:
    account = account_of(request)
    if account is None:
        raise RefusalError(401, "Invalid username or password.")
    if account != (owner, "write"):
        raise RefusalError(403, f"You don't have the rights to write for {owner}")


def application(hub: HubServer) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(RefusalError)
    def refused(request: Request, refusal: RefusalError):
        headers = {"X-Error-Message": str(refusal)} | (
            {"X-Error-Code": refusal.code} if refusal.code else {}
        )
        return JSONResponse(refusal.content, refusal.status, headers)

    @app.middleware("http")
    async def refused_by_order(request: Request, answer):
        for pattern, status in hub.refuse:
            if re.search(pattern, f"{request.method} {request.url.path}"):
                return refused(request, RefusalError(status, "refused by order"))
        return await answer(request)

    @app.get("/api/whoami-v2")
    def whoami(request: Request):
        if (account := account_of(request)) is None:
            raise RefusalError(401, "Invalid username or password.")
        token = {"displayName": "test", "role": account[1]}
        return {"type": "user", "name": account[0], "orgs": [], "auth": {"accessToken": token}}

    @app.post("/api/repos/create")
    async def create(request: Request):
        given, account = await request.json(), account_of(request)
        owner = given.get("organization") or (account or ("",))[0]
        repo_id = f"{owner}/{given['name']}"
        check_writer(owner, request)
        if hub.has(repo_id):
            raise RefusalError(
                409, "You already created this model repo", url=f"{hub.url}/{repo_id}"
            )
        Repository.create(
            hub.root / repo_id, given.get("visibility") == "private" or bool(given.get("private"))
        )
        return {"url": f"{hub.url}/{repo_id}", "name": repo_id}

    @app.post("/api/validate-yaml")
    async def validate(request: Request):
        """The structure of the metadata that the Hub insists on."""
        match = re.match(r"---\n(.*?)\n---\n", (await request.json())["content"], re.DOTALL)
        data, errors = yaml.safe_load(match[1]) if match else {}, []
        for result in (
            result for model in data.get("model-index", []) for result in model["results"]
        ):
            wanted = [
                (result.get("task", {}), {"type"}),
                (result.get("dataset", {}), {"type", "name"}),
            ]
            wanted += [(metric, {"type", "value"}) for metric in result.get("metrics", [{}])]
            errors += [
                {"message": f"{names - found.keys()} missing"}
                for found, names in wanted
                if names - found.keys()
            ]
        if errors:
            raise RefusalError(400, "Invalid metadata", errors=errors)
        return {"errors": [], "warnings": []}

    @app.get(MODEL)
    @app.get(MODEL + "/revision/{revision}")
    def info(owner: str, name: str, request: Request, revision: str = "main"):
        repository = hub.readable(f"{owner}/{name}", request)
        siblings = [{"rfilename": path} for path in repository.files(revision)]
        found = {
            "id": f"{owner}/{name}",
            "private": repository.state["private"],
            "sha": repository.find(revision),
        }
        return found | {"siblings": siblings}

    @app.get(MODEL + "/tree/{revision}")
    @app.get(MODEL + "/tree/{revision}/{path:path}")
    def tree(owner: str, name: str, revision: str, request: Request, path: str = ""):
        """All files in a folder, also in those in it."""
        files = hub.readable(f"{owner}/{name}", request).files(revision)
        found = [
            {"type": "file", "path": file} | entry
            for file, entry in sorted(files.items())
            if file.startswith(path)
        ]
        if path and not found:
            raise RefusalError(404, f"{path} does not exist", "EntryNotFound")
        return found

    @app.post(MODEL + "/preupload/{revision}")
    async def preupload(owner: str, name: str, revision: str, request: Request):
        check_writer(owner, request)
        known, answers = hub.readable(f"{owner}/{name}", request).files(revision), []
        for file in (await request.json())["files"]:
            answers.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False})
            answers[-1] |= {"oid": known[file["path"]]["oid"]} if file["path"] in known else {}
        return {"files": answers}

    @app.post(MODEL + "/commit/{revision}")
    async def commit(owner: str, name: str, revision: str, request: Request):
        check_writer(owner, request)
        repository = hub.readable(f"{owner}/{name}", request)
        files, title = dict(repository.files(revision)), ""
        for operation in map(json.loads, (await request.body()).decode().splitlines()):
            kind, value = operation["key"], operation["value"]
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, repository.find(revision)):
                    raise RefusalError(412, "A commit has happened since.")
            elif kind == "file":
                files[value["path"]] = repository.keep(base64.b64decode(value["content"]))
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise RefusalError(400, f"unknown operation {kind}")
        oid = repository.commit(revision, title, files)
        return {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{hub.url}/{owner}/{name}/commit/{oid}",
        }

    @app.api_route("/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(owner: str, name: str, revision: str, path: str, request: Request):
        repository = hub.readable(f"{owner}/{name}", request)
        headers = {"X-Repo-Commit": repository.find(revision)}
        entry = repository.files(revision).get(path)
        if entry is None:
            return JSONResponse(
                {"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"}
            )
        return Response(
            repository.read(path, revision), headers=headers | {"ETag": f'"{entry["oid"]}"'}
        )

    return app
