"""What the small Hub of the tests keeps: accounts, and folders with commits and large files."""

import hashlib
import json
from fnmatch import fnmatch
from pathlib import Path

WRITE, READ = "hf_dummyWrites", "hf_dummyReads"
ACCOUNTS = {WRITE: ("user", "write"), READ: ("user", "read")}  # the name of who has the token, and its role
ENDS = ("bin", "model", "pt", "safetensors", "zip")
ATTRIBUTES = "".join(f"*.{end} filter=lfs diff=lfs merge=lfs -text\n" for end in ENDS)
LARGEST_REGULAR = 10_000_000  # bytes


class RefusalError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str = "", **content):
        super().__init__(message)
        self.status, self.code, self.content = status, code, {"error": message, **content}


class Repository:
    """A repository's folder: repo.json with refs and commits, `blobs` by SHA-1 and `lfs` by SHA-256."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = json.loads((folder / "repo.json").read_text())

    @classmethod
    def create(cls, folder: Path, private: bool) -> "Repository":
        (folder / "blobs").mkdir(parents=True)
        (folder / "lfs").mkdir()
        (folder / "repo.json").write_text(json.dumps({"private": private, "heads": {}, "commits": {}}))
        repository = cls(folder)
        entry = repository.keep(ATTRIBUTES.encode())
        repository.commit("main", "initial commit", {".gitattributes": entry})
        return repository

    def keep(self, content: bytes) -> dict:
        """Stores a regular file as git names it, and returns its entry."""
        digest = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        (self.folder / "blobs" / digest).write_bytes(content)
        return {"oid": digest, "size": len(content), "lfs": False}

    def commit(self, branch: str, title: str, files: dict[str, dict]) -> str:
        content = {"parent": self.state["heads"].get(branch), "title": title, "files": files}
        oid = hashlib.sha1(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self.state["commits"][oid] = content
        self.state["heads"][branch] = oid
        self.save()
        return oid

    def save(self) -> None:
        (self.folder / "repo.json").write_text(json.dumps(self.state))

    def find(self, revision: str) -> str:
        """The commit of a branch or a commit's own name."""
        for commits in (self.state["heads"], {oid: oid for oid in self.state["commits"]}):
            if revision in commits:
                return commits[revision]
        raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str = "main") -> dict[str, dict]:
        return self.state["commits"][self.find(revision)]["files"]

    def read(self, path: str, revision: str = "main") -> bytes:
        entry = self.files(revision)[path]
        return (self.folder / ("lfs" if entry["lfs"] else "blobs") / entry["oid"]).read_bytes()

    def listing(self, revision: str, path: str, recursive: bool) -> list[dict]:
        """The files and folders in a folder, as the Hub describes them."""
        files = {name: entry for name, entry in self.files(revision).items() if name.startswith(path)}
        if path and not files:
            raise RefusalError(404, f"{path} does not exist", "EntryNotFound")
        entries, folders, start = [], set(), len(path) + 1 if path else 0
        for name, entry in sorted(files.items()):
            folder, slash, _ = name[start:].partition("/")
            if slash:
                folders.add(name[:start] + folder)
            if recursive or not slash:
                shown = {"oid": entry["oid"], "size": entry["size"]}
                large = {"lfs": shown | {"pointerSize": 130}} if entry["lfs"] else {}
                entries.append({"type": "file", "path": name} | shown | large)
        return entries + [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(folders)]

    def is_large(self, path: str, size: int, sample: bytes, revision: str) -> bool:
        patterns = [line.split()[0] for line in self.read(".gitattributes", revision).decode().splitlines()]
        named = any(fnmatch(path.split("/")[-1], pattern) for pattern in patterns)
        return named or size > LARGEST_REGULAR or b"\0" in sample
