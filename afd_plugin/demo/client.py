# SPDX-License-Identifier: Apache-2.0
"""Sends OpenAI completion requests to a server on this host, one at a time. Standard library only.

The server is asked for token ids instead of text: as candidates' names they are unambiguous where the text
of two tokens is not.
"""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from afd_plugin.demo.prompts import MAX_TOKENS, PROMPTS
from afd_plugin.demo.records import TOP_LOGPROBS, Generation, Record, best

REQUEST_TIMEOUT_S = 60.0
_TOKEN_PREFIX = "token_id:"  # noqa: S105 (vLLM's marker of an id in place of a token's text)


class RequestError(RuntimeError):
    """A request that was not answered as asked; the sentence quotes the server."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI server and the name under which it serves its model.

    `data_parallel_rank` asks vLLM to run the requests on that rank instead of the least busy one.
    """

    host: str
    port: int
    model: str
    data_parallel_rank: int | None = None

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers `/health` with 200; False while it does not listen yet."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def complete(self, prompt: str, max_tokens: int = MAX_TOKENS) -> tuple[Generation, float]:
        """The greedy answer to `prompt`, `max_tokens` long, and the seconds it took."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": TOP_LOGPROBS,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        started = time.perf_counter()
        answer = self._post("/v1/completions", body)
        return generation_of(answer), time.perf_counter() - started

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self.data_parallel_rank is not None:
            headers["X-data-parallel-rank"] = str(self.data_parallel_rank)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"http://{self.host}:{self.port}{path} gave no answer "
                f"within {REQUEST_TIMEOUT_S:.0f} s: {error}"
            ) from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RequestError(f"http://{self.host}:{self.port}{path} answered {response.status}: {text}")
        content: dict[str, Any] = json.loads(text)
        return content


def generation_of(answer: dict[str, Any]) -> Generation:
    """The generation in a completion answer; RequestError when a field asked for is missing."""
    try:
        choice = answer["choices"][0]
        return Generation(
            prompt_token_ids=tuple(choice["prompt_token_ids"]),
            token_ids=tuple(choice["token_ids"]),
            top_logprobs=tuple(
                best({_token_id(name): value for name, value in position.items()})
                for position in choice["logprobs"]["top_logprobs"]
            ),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise RequestError(f"a completion answer lacks what the request asked for ({error!r})") from error


def _token_id(name: str) -> int:
    if not name.startswith(_TOKEN_PREFIX):
        raise RequestError(f"a candidate is named {name!r}; {_TOKEN_PREFIX}N was asked for")
    return int(name.removeprefix(_TOKEN_PREFIX))


def record(endpoint: Endpoint, prompts: Sequence[str] = PROMPTS) -> Record:
    """The answers to all prompts, one request in flight."""
    answers = [endpoint.complete(prompt) for prompt in prompts]
    return Record(
        tuple(generation for generation, _ in answers), {"seconds": [seconds for _, seconds in answers]}
    )
