"""A local server that answers POST requests as a script says and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    """Answers in turn from a script, whose last line repeats.

    A number is a status, a string a chat completion, "hang" no answer, None a body that is no JSON, and anything else
    a JSON body.
    """

    def __init__(self, *script):
        self.script, self.asked = list(script), []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append({"path": self.path, "body": body, "key": self.headers.get("Authorization")})
                turn = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if turn == "hang":
                    time.sleep(1.5)
                    return
                reply = {"choices": [{"message": {"content": turn}}]} if isinstance(turn, str) else turn
                data = b"<html>" if turn is None or isinstance(turn, int) else json.dumps(reply).encode()
                self.send_response(turn if isinstance(turn, int) else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()


def moderation(flagged, **scores):
    """The answer of a moderation endpoint; categories that score at least 0.5 are the flagged ones."""
    scores = {name.replace("_", "/"): value for name, value in scores.items()}
    found = {name: flagged and value >= 0.5 for name, value in scores.items()}
    return {"id": "m", "results": [{"flagged": flagged, "categories": found, "category_scores": scores}]}
