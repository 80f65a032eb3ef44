"""An MCP server for tests, over pipes or HTTP: `python mcp_server.py [MODE]`. Most modes misbehave, each in its own way.

exit: ends at once. silent: never answers. garbage: prints for ever what is no message. banner: prints a line first. endless: a
line without an end. once: ends when it is called. http PORT: speaks HTTP, and prints its port; it can be asked for a
body of 64 MiB, in three forms, and for the header with the key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NO_ARGUMENTS = {"type": "object", "properties": {}}
TOOLS = {
    "echo": ("Gives the text back.", SCHEMA),
    "refuse": ("Says that it was asked wrongly.", NO_ARGUMENTS),
    "picture": ("Gives a picture, a link and a text.", NO_ARGUMENTS),
    "environment": ("Names the variables it has.", NO_ARGUMENTS),
    "child": ("Starts a process that sleeps, and gives its number.", NO_ARGUMENTS),
    "die": ("Ends the server.", NO_ARGUMENTS),
    "hang": ("Never answers, and keeps the server from answering others.", NO_ARGUMENTS),
    "invalid": ("Answers that the parameters are invalid.", NO_ARGUMENTS),
    "broken": ("Answers with an error of the protocol.", NO_ARGUMENTS),
    "nonsense": ("Answers with what is no result.", NO_ARGUMENTS),
    "process": ("Gives the server's process number.", NO_ARGUMENTS),
}


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.stderr.write(f"started in mode {mode or 'plain'}\n")
    sys.stderr.flush()
    if mode == "http":
        serve(int(sys.argv[2]))
    if mode == "exit":
        sys.exit(3)
    if mode == "silent":
        time.sleep(600)
    while mode == "garbage":
        say("no message")
    while mode == "endless":
        sys.stdout.write("x" * 2**20)
    if mode == "banner":
        say("Welcome to the server!")
    for line in sys.stdin:
        request = json.loads(line)
        if mode == "once" and request["method"] == "tools/call":
            os._exit(9)
        if "id" in request:
            say(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(request)}))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


FLOODS = {
    "flood": ("application/json", "identity", b'"'),
    "events": ("text/event-stream", "identity", b"event: message\ndata: "),
    "packed": ("application/json", "gzip", b""),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        called = request.get("params", {}).get("name")
        if called in FLOODS:
            self.flood(*FLOODS[called])
            return
        body = b""
        if "id" in request:
            body = json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(request)}).encode()
        if called == "key":
            body = body.replace(b"KEY", self.headers["authorization"].encode())
        self.send_response(200 if body else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def flood(self, kind: str, packing: str, start: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-encoding", packing)
        self.end_headers()
        try:
            self.wfile.write(start)
            for _ in range(64):
                self.wfile.write(b"x" * 2**20)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def serve(port: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    say(str(server.server_port))
    server.serve_forever()


def answer(request: dict) -> dict:
    method, parameters = request["method"], request.get("params") or {}
    if method == "initialize":
        version = parameters["protocolVersion"]
        about = {"name": "test", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "tools/list":
        tools = [{"name": name, "description": about, "inputSchema": schema} for name, (about, schema) in TOOLS.items()]
        half = len(tools) // 2
        if parameters.get("cursor"):
            return {"result": {"tools": tools[half:]}}
        return {"result": {"tools": tools[:half], "nextCursor": "2"}}
    if method == "tools/call":
        return called(parameters["name"], parameters.get("arguments") or {})
    return {"error": {"code": -32601, "message": "method not found"}}


def called(name: str, arguments: dict) -> dict:
    if name == "die":
        sys.stderr.write("I die now\n")
        sys.stderr.flush()
        os._exit(9)
    if name == "hang":
        time.sleep(600)
    if name == "invalid":
        return {"error": {"code": -32602, "message": "text is too short"}}
    if name == "broken":
        return {"error": {"code": -32603, "message": "the disk is full"}}
    if name == "nonsense":
        return {"result": {"content": 3}}
    if name == "picture":
        content = [
            {"type": "image", "mimeType": "image/png", "data": "AAAA"},
            {"type": "resource_link", "uri": "file:///a.txt", "name": "a"},
            {"type": "text", "text": "a cat"},
        ]
        return {"result": {"content": content}}
    text = {
        "echo": lambda: arguments["text"],
        "refuse": lambda: "no such file",
        "environment": lambda: " ".join(sorted(os.environ)),
        "child": lambda: str(subprocess.Popen(["sleep", "600"]).pid),
        "process": lambda: str(os.getpid()),
        "key": lambda: "KEY",
    }[name]()
    return {"result": {"content": [{"type": "text", "text": text}], "isError": name == "refuse"}}


if __name__ == "__main__":
    main()
