"""What the small Hub of the tests keeps: accounts, and folders with commits."""

import hashlib
import json
from pathlib import Path

WRITE, READ = "hf_dummyWrites", "hf_dummyReads"
# the name of who has the token, and its role
ACCOUNTS = {WRITE: ("user", "write"), READ: ("user", "read")}


class RefusalError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str = "", **content):
        super().__init__(message)
        self.status, self.code, self.content = status, code, {"error": message, **content}


class Repository:
    """A repository's folder: repo.json with heads and commits, and `blobs` by SHA-1."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = json.loads((folder / "repo.json").read_text())

    @classmethod
    def create(cls, folder: Path, private: bool) -> "Repository":
        (folder / "blobs").mkdir(parents=True)
        (folder / "repo.json").write_text(
            json.dumps({"private": private, "heads": {}, "commits": {}})
        )
        repository = cls(folder)
        entry = repository.keep(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        repository.commit("main", "initial commit", {".gitattributes": entry})
        return repository

    def keep(self, content: bytes) -> dict:
        """Stores a regular file as git names it, and returns its entry."""
        digest = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        (self.folder / "blobs" / digest).write_bytes(content)
        return {"oid": digest, "size": len(content)}

    def commit(self, branch: str, title: str, files: dict[str, dict]) -> str:
        content = {"parent": self.state["heads"].get(branch), "title": title, "files": files}
        oid = hashlib.sha1(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self.state["commits"][oid] = content
        self.state["heads"][branch] = oid
        (self.folder / "repo.json").write_text(json.dumps(self.state))
        return oid

    def find(self, revision: str) -> str:
        """The commit of a branch or a commit's own name."""
        oid = self.state["heads"].get(revision, revision)
        if oid not in self.state["commits"]:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    def files(self, revision: str = "main") -> dict[str, dict]:
        return self.state["commits"][self.find(revision)]["files"]

    def read(self, path: str, revision: str = "main") -> bytes:
        return (self.folder / "blobs" / self.files(revision)[path]["oid"]).read_bytes()
