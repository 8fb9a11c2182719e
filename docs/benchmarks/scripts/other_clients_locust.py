"""Users of ``other_clients`` for locust. They print a line of JSON a request: its status, and what is wrong.

They are of two tenants. No answer may hold text of the other, and none may come of a deleted conversation.
"""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

from locust import HttpUser, events, task  # type: ignore[import-not-found]
from requests.adapters import HTTPAdapter

_TENANTS, _NUMBERS = ("ada", "ben"), count()


class User(HttpUser):  # type: ignore[misc]
    """A client on one of eight addresses."""

    def on_start(self) -> None:
        number = next(_NUMBERS)
        name, other = _TENANTS[number % 2], _TENANTS[1 - number % 2]
        self.secret, self.others_secret = f"secret of {name}", f"secret of {other}"
        adapter = HTTPAdapter()
        adapter.init_poolmanager(10, 10, source_address=(f"127.0.0.{11 + number % 8}", 0))
        self.client.mount("http://", adapter)
        self.client.headers["Authorization"] = f"Bearer {name}-0123456789abcdef"
        self.client.trust_env = False
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def send(self, method: str, path: str, *fine: int, left: bool = False, **more: Any) -> Any:
        """The answer; its status must be a fine one, or 429. One that is left is not read to its end."""
        with self.client.request(method, path, catch_response=True, stream=left, **more) as answer:
            if left:
                next(answer.iter_content(50), None)
                answer.close()
            if answer.status_code not in (*fine, 429):
                answer.failure(f"{answer.status_code} of {method} {path}")
            elif not left and self.others_secret in answer.text:
                answer.failure("text of another tenant")
            else:
                answer.success()
        return answer

    @task(3)
    def response(self) -> None:
        body = {"model": self.model, "input": self.secret, "metadata": {"secret": self.secret}, "max_output_tokens": 4}
        self.send("POST", "/v1/responses", 200, json={**body, "stream": random.random() < 0.5})

    @task(2)
    def response_left(self) -> None:
        body = {"model": self.model, "input": "red", "max_output_tokens": 300, "stream": True}
        self.send("POST", "/v1/responses", 200, left=True, json=body)

    @task(3)
    def conversation(self) -> None:
        made = self.send("POST", "/api/conversations", 201, 409, json={"collections": ["archive"]})
        if made.status_code != 201:  # there are as many as may be
            self.send("DELETE", "/api/conversations", 204)
            return
        id = made.json()["id"]
        path = f"/api/conversations/{id}"
        question = {"question": self.secret, "conversation": id, "stream": False, "max_tokens": 3}
        # Another user of the tenant may delete all of its conversations meanwhile.
        self.send("POST", "/api/collections/archive/ask", 200, 404, 409, json=question)
        shared = self.send("POST", f"{path}/shares", 201, 404, 409)
        deleted = self.send("DELETE", path, 204, 404)
        if shared.status_code == 201 and deleted.status_code == 204:
            self.send("GET", f"/api/shared/{shared.json()['id']}", 404)

    @task
    def odd_id(self) -> None:
        self.send("GET", f"/api/conversations/{random.choice(('%00', '%ff', 'x' * 500, '-1'))}", 404)


@events.request.add_listener  # type: ignore[untyped-decorator]
def _note(response: Any, exception: Exception | None, **_: Any) -> None:
    print(json.dumps([str(getattr(response, "status_code", 0) or "no answer"), str(exception or "")]), flush=True)
