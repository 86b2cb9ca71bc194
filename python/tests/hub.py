"""A Hub for tests, as its documentation and its own client describe it. `test_hub.py` holds the client against it.

    api, tree by pages, /resolve/ ── 127.0.0.1, with the token ──► signed URL ── localhost, without it ──► bytes
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import time
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS = 512  # Files of this size are in the store, smaller ones in Git.
KINDS = {"datasets": "datasets/", "models": "", "spaces": "spaces/"}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_error):
        """Clients that leave are no news."""


class Hub:
    def __init__(self):
        self.commits, self.refs, self.blobs = {}, {}, {}
        self.log, self.lock = [], threading.Lock()
        self.page, self.token, self.gated, self.cdn_hosts = 1000, None, False, ["localhost"]
        self.signature, self.uses, self.left = 0, None, None
        self.quotas = {}
        hub = self

        class Api(Handler):
            def do_GET(self):
                hub.api(self)

            do_HEAD = do_POST = do_GET

        class Cdn(Handler):
            def do_GET(self):
                hub.cdn(self)

            do_HEAD = do_GET

        self.servers = [Server(("127.0.0.1", 0), Api), Server(("127.0.0.1", 0), Cdn)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.servers[0].server_port}"

    def close(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def commit(self, repo, files, ref="main"):
        """Makes a commit of the repository, such as `datasets/org/name`, and moves a branch to it."""
        sha = hashlib.sha1(repr((repo, sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[repo, sha] = files
        self.refs[repo, ref] = sha
        self.blobs.update({oid(data): data for data in files.values()})
        return sha

    def expire(self):
        """All signed URLs so far are refused from now on."""
        self.signature += 1

    def asked(self, part, host="api"):
        """The requests so far whose path has this part."""
        with self.lock:
            return [entry for entry in self.log if entry["host"] == host and part in entry["path"]]

    # The two servers.

    def note(self, request, host):
        entry = {"host": host, "method": request.command, "path": unquote(request.path), "range": request.headers.get("Range"),
                 "token": request.headers.get("Authorization"), "name": request.headers.get("Host"), "refused": False}
        with self.lock:
            self.log.append(entry)

    def api(self, request):
        self.note(request, "api")
        url = urlsplit(request.path)
        quota = "resolvers" if "/resolve/" in url.path else "api"
        headers = self.count(quota)
        if headers is None:
            self.log[-1]["refused"] = True
            left = max(0, int(self.quotas[quota][2] - time.time()))
            policy = f'"fixed window";"{quota}";q={self.quotas[quota][0]};w=300'
            return request.send(429, {"RateLimit": f'"{quota}";r=0;t={left}', "RateLimit-Policy": policy}, "Too Many Requests")
        name = r"(datasets|models|spaces)/([^/]+/[^/]+)"
        call = re.fullmatch(rf"/api/{name}(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", url.path)
        file = re.fullmatch(r"/(datasets/|spaces/|)([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        kept = re.fullmatch(rf"/api/resolve-cache/{name}/([^/]+)/(.+)", url.path)
        if kept:
            kind, name, rev, path = kept.groups()
            return self.serve(request, self.commits[f"{kind}/{name}", rev][unquote(path)], {**headers, "X-Repo-Commit": rev})
        if call:
            kind, name, rev = call.group(1), call.group(2), call.group(4)
        else:
            kind, name, rev = file.group(1)[:-1] or "models", file.group(2), file.group(3)
        repo, rev = f"{kind}/{name}", unquote(rev or "main")
        sha = rev if (repo, rev) in self.commits else self.refs.get((repo, rev))
        given = request.headers.get("Authorization")
        wrong = self.token is not None and given not in (None, f"Bearer {self.token}")
        if wrong:
            return request.refuse(401, None, f"Invalid credentials in Authorization header {given}")
        if (self.token and not given and not self.gated) or not any(key[0] == repo for key in self.commits):
            return request.refuse(401 if not given else 404, "RepoNotFound", "Repository not found")
        if sha is None:
            return request.refuse(404, "RevisionNotFound", "Invalid rev id")
        if self.gated and not given and not (call and call.group(3) == "revision"):
            return request.refuse(401, "GatedRepo", f"Access to {name} is restricted. You must be authenticated to access it.")
        files = self.commits[repo, sha]
        headers["X-Repo-Commit"] = sha
        if call and call.group(3) in (None, "revision"):
            return request.send(200, headers, {"id": name, "sha": sha, "private": False, "tags": [], "siblings": []})
        if call and call.group(3) == "paths-info":
            paths = parse_qs(request.body().decode()).get("paths", [])
            found = [entry for entry in tree(files, "", True) if entry["path"] in paths]
            return request.send(200, headers, found)
        if call:
            return self.list(request, url, files, unquote(call.group(5) or ""), headers)
        self.resolve(request, repo, sha, files, unquote(file.group(4)), headers)

    def count(self, quota):
        """The headers of an answer that counts against a quota; None if it is used up."""
        with self.lock:
            if quota not in self.quotas:
                return {}
            limit, window, end, used = self.quotas[quota]
            if time.time() >= end:
                end, used = time.time() + window, 0
            self.quotas[quota] = (limit, window, end, used + 1)
            if used >= limit:
                return None
            return {"RateLimit": f'"{quota}";r={limit - used - 1};t={max(0, int(end - time.time()))}'}

    def limit(self, quota, requests, seconds):
        self.quotas[quota] = (requests, seconds, 0, 0)

    def list(self, request, url, files, folder, headers):
        query = parse_qs(url.query)
        entries = tree(files, folder, query.get("recursive", ["false"])[0].lower() == "true")
        if not entries:
            return request.refuse(404, "EntryNotFound", "not found")
        start = int(base64.b64decode(query["cursor"][0])) if "cursor" in query else 0
        if start + self.page < len(entries):
            cursor = quote(base64.b64encode(str(start + self.page).encode()).decode())
            rest = "&".join(f"{key}={value[0]}" for key, value in query.items() if key != "cursor")
            headers["Link"] = f'<{self.endpoint}{url.path}?{rest}&cursor={cursor}>; rel="next"'
        request.send(200, headers, entries[start : start + self.page])

    def resolve(self, request, repo, sha, files, path, headers):
        data = files.get(path)
        if data is None:
            return request.refuse(404, "EntryNotFound", "Entry not found")
        etag = oid(data)
        if len(data) < LFS:
            kind, name = repo.split("/", 1)
            headers["Location"] = f"/api/resolve-cache/{kind}/{name}/{sha}/{quote(path)}"
            return request.send(307, {**headers, "ETag": f'"{etag}"'}, "Temporary Redirect")
        with self.lock:
            host = self.cdn_hosts[len(self.log) % len(self.cdn_hosts)]
            self.left = self.uses
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)), "ETag": f'"{etag}"'}
        place = f"http://{host}:{self.servers[1].server_port}/repos/{etag}"
        headers["Location"] = f"{place}?Expires=9&Signature=signed-{self.signature}"
        request.send(302, headers, "Found")

    def cdn(self, request):
        self.note(request, "cdn")
        url = urlsplit(request.path)
        data = self.blobs[url.path.rsplit("/", 1)[1]]
        if request.headers.get("Authorization"):
            return request.send(400, {}, "<Error><Code>InvalidArgument</Code></Error>")
        with self.lock:
            if self.left is not None:
                self.left -= 1
                self.signature += self.left < 0
        if f"signed-{self.signature}" not in url.query:
            return request.send(403, {}, "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        etag = f"{hashlib.md5(data).hexdigest()}-3"
        if request.headers.get("If-Match", f'"{etag}"') != f'"{etag}"':
            return request.send(412, {}, "")
        self.serve(request, data, {}, etag)

    def serve(self, request, data, headers, etag=None):
        headers = {**headers, "ETag": f'"{etag or oid(data)}"', "Accept-Ranges": "bytes"}
        wanted = request.headers.get("Range")
        if not wanted:
            return request.send(200, headers, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        first, last = int(first), min(int(last or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        request.send(206, headers, data[first : last + 1])


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def refuse(self, status, code, words):
        self.send(status, ({"X-Error-Code": code} if code else {}) | {"X-Error-Message": words}, {"error": words})

    def send(self, status, headers, body=b""):
        kind = {bytes: "application/octet-stream", str: "text/plain"}.get(type(body), "application/json")
        if isinstance(body, str):
            body = body.encode()
        elif not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        headers = {"Content-Type": kind, "X-Request-Id": "Root=1-scripted", **headers, "Content-Length": len(body)}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_words):
        pass


def oid(data):
    """The SHA-256 of a file in the store, the Git hash of one in Git."""
    if len(data) >= LFS:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree(files, folder, recursive):
    """The entries of a folder, as the API lists them."""
    start = f"{folder}/" if folder else ""
    entries = {}
    for path, data in files.items():
        if not path.startswith(start):
            continue
        parts = path[len(start) :].split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            above = start + "/".join(parts[:depth])
            entries[above] = {"type": "directory", "oid": hashlib.sha1(above.encode()).hexdigest(), "size": 0, "path": above}
        if recursive or len(parts) == 1:
            git = hashlib.sha1(b"pointer" + data).hexdigest() if len(data) >= LFS else oid(data)
            lfs = {"lfs": {"oid": oid(data), "size": len(data), "pointerSize": 130}} if len(data) >= LFS else {}
            entries[path] = {"type": "file", "oid": git, "size": len(data), "path": path, **lfs}
    return [entries[path] for path in sorted(entries)]
