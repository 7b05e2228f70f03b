"""An API server of Kubernetes that knows Leases: on loopback, with what can go wrong."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lightkube import KubeConfig
from lightkube.config.models import Cluster, User

PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/?]+))?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
Answer = tuple[int, dict[str, Any]]


class Refusal(Exception):
    """A status in the form of the API server."""

    def __init__(self, code: int, reason: str) -> None:
        self.answer: Answer = (
            code,
            {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            | {"reason": reason, "message": f"{reason}, says the server"},
        )


class FakeApiServer:
    """Its faults: each is asked, with method and name, before (`before`) or after (`after`) the
    request has taken effect; what it returns is the answer instead.  None: go on."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.token = "token-1"
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str], Answer | None] = lambda method: None
        self.after: Callable[[str], Answer | None] = lambda method: None
        self.revision = 100
        self._guard = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def config(self, folder: Path) -> Callable[[], KubeConfig]:
        """As of a pod whose token lies in a file."""
        file = folder / "token"
        file.write_text(self.token)
        user = User(token=self.token, token_file=str(file))
        return lambda: KubeConfig.from_one(
            cluster=Cluster(server=self.url), user=user, namespace="messages"
        )

    def change(self, name: str, **annotations: str | None) -> None:
        """What somebody else writes; None removes."""
        with self._guard:
            lease = self.leases["messages", name]
            for key, value in annotations.items():
                lease["metadata"]["annotations"].pop(f"duemq/{key}", None)
                if value is not None:
                    lease["metadata"]["annotations"][f"duemq/{key}"] = value
            self._stamp(lease)

    # -- requests

    def _handle(self, method: str, path: str, token: str | None, body: bytes) -> Answer:
        self.calls[method] += 1
        instead = self.before(method)
        if instead is not None:
            return instead
        try:
            if token != f"Bearer {self.token}":
                raise Refusal(401, "Unauthorized")
            match = PATH.fullmatch(path)
            if match is None:
                raise Refusal(404, "NotFound")
            with self._guard:
                answer = self._apply(method, match[1], match[2], json.loads(body or b"null"))
        except Refusal as refusal:
            return refusal.answer
        return self.after(method) or answer

    def _apply(self, method: str, namespace: str, name: str | None, given: Any) -> Answer:
        there = self.leases.get((namespace, name or ""))
        if method == "POST":
            _check(given)
            key = namespace, given["metadata"]["name"]
            if key in self.leases:
                raise Refusal(409, "AlreadyExists")
            given["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4())}
            self.leases[key] = self._stamp(given)
            return 201, given
        if there is None:
            raise Refusal(404, "NotFound")
        if method == "PUT":
            _check(given)
            new, old = given["metadata"], there["metadata"]
            if new.get("resourceVersion") is None:
                raise Refusal(422, "Invalid")
            if new.get("uid", old["uid"]) != old["uid"]:
                raise Refusal(409, "Conflict")
            if new["resourceVersion"] != old["resourceVersion"]:
                raise Refusal(409, "Conflict")
            self.leases[namespace, name or ""] = there = self._stamp(given)
        return 200, there

    def _stamp(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.revision += 1
        lease["metadata"]["resourceVersion"] = str(self.revision)
        return lease

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size)
                token = self.headers.get("Authorization")
                code, answer = server._handle(self.command, self.path, token, body)
                if not code:  # it breaks off
                    self.close_connection = True
                    return
                data = answer.get("text", json.dumps(answer)).encode()
                self.send_response(code)
                if "text" not in answer:
                    self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _answer

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _check(lease: dict[str, Any]) -> None:
    """What the API server is strict about."""
    spec = lease["spec"]
    for key in ("acquireTime", "renewTime"):
        if spec.get(key) is not None and not MICRO_TIME.fullmatch(spec[key]):
            raise Refusal(400, "BadRequest")
    if (spec.get("leaseDurationSeconds") or 1) <= 0 or (spec.get("leaseTransitions") or 0) < 0:
        raise Refusal(422, "Invalid")
