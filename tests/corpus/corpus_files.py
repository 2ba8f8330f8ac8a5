"""What the tests of the corpus share: rows of XSum, running commands, and a Hugging Face hub on this machine."""

import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
from support import REPO_ROOT

SAMPLE = REPO_ROOT / "megatron_data" / "sample"
ARTICLES = [json.loads(line)["document"] for line in (SAMPLE / "articles.jsonl").read_text().splitlines()]
DOCUMENTS = ["First.\nIt rained \u2014 a lot.", "", " \n", "Third.", None, "Last."]
ROWS = [{"document": text, "summary": "S.", "id": None if text == "Third." else "x"} for text in DOCUMENTS]
TEXTS = [text for text in DOCUMENTS if text and text.strip()]
NO_HUB = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def in_parquet(rows: list[dict], **options: bool) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def export(**environment: str) -> subprocess.CompletedProcess[str]:
    """scripts/export_xsum_corpus.py."""
    environment |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    command = [sys.executable, REPO_ROOT / "scripts" / "export_xsum_corpus.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Status 2, one error of one sentence and what to do; together they hold the parts."""
    assert result.returncode == 2, result.stderr
    assert len(re.findall(r"^error: .+\n       \S", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


class Hub(http.server.SimpleHTTPRequestHandler):
    """As much of the Hugging Face hub as fetching files asks for: its public HTTP API as a tree of files."""

    def end_headers(self) -> None:
        known = Path(self.directory, "datasets", "EdinburghNLP").exists()
        self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", hashlib.sha256(self.path.encode()).hexdigest())
        super().end_headers()

    def log_message(self, *_: object) -> None:
        if self.command == "GET" and "/resolve/" in self.path:
            self.downloads.append(self.path.partition(f"{COMMIT}/")[2])


def add_repository(root: Path, name: str, revision: str, files: dict[str, bytes]) -> None:
    info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
    api = f"api/{name}/{revision}" if name.startswith("datasets/") else f"api/models/{name}/{revision}"
    contents = {f"{name}/resolve/{COMMIT}/{file}": content for file, content in files.items()}
    for path, content in (contents | {api: json.dumps(info).encode()}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def serve_hub(root: Path) -> tuple[str, list[str]]:
    """The hub's address and the list of files that are fetched from it, until the tests end."""
    handler = type("ThisHub", (Hub,), {"downloads": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", handler.downloads
