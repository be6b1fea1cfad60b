# SPDX-License-Identifier: Apache-2.0
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from afd_plugin.demo.client import Endpoint, RequestError, generation_of, record
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import ALL_TOGETHER, ONE_AT_A_TIME, command
from afd_plugin.demo.prompts import PROMPTS

FLOAT32_THIRD = -0.3333333432674408
ANSWER: dict[str, Any] = {
    "choices": [
        {
            "prompt_token_ids": [0, 5],
            "token_ids": [7],
            "logprobs": {"top_logprobs": [{"token_id:9": -2.5, "token_id:7": FLOAT32_THIRD}]},
        }
    ]
}


class Handler(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict[str, Any]]] = []
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 (the base class names it)
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(Handler, "bodies", [])
    monkeypatch.setattr(Handler, "status", 200)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Endpoint("127.0.0.1", server.server_address[1], "deepseek-v2")
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_read_exactly_and_best_first(endpoint: Endpoint) -> None:
    generation, seconds = endpoint.complete("x")
    assert generation.token_ids == (7,)
    assert generation.top_logprobs == (((7, FLOAT32_THIRD), (9, -2.5)),)
    assert seconds > 0


def test_the_request_is_greedy_with_three_logprobs_and_ignores_eos(endpoint: Endpoint) -> None:
    endpoint.complete("x", max_tokens=5)
    assert Handler.bodies == [
        {
            "model": "deepseek-v2",
            "prompt": "x",
            "max_tokens": 5,
            "temperature": 0.0,
            "logprobs": 3,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    ]


def test_a_record_holds_one_answer_for_each_prompt_in_order(endpoint: Endpoint) -> None:
    assert len(record(endpoint).generations) == len(PROMPTS)
    assert [body["prompt"] for body in Handler.bodies] == list(PROMPTS)


def test_a_refused_request_quotes_the_server(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "status", 400)
    with pytest.raises(RequestError, match=r"answered 400.*choices"):
        endpoint.complete("x")


def test_a_server_that_listens_is_healthy_and_one_that_does_not_is_not(endpoint: Endpoint) -> None:
    assert endpoint.healthy()
    assert not Endpoint("127.0.0.1", 1, "x").healthy()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"token_ids": [7]}]},
        {"choices": [{"prompt_token_ids": [0], "token_ids": [7], "logprobs": None}]},
        {
            "choices": [
                {"prompt_token_ids": [0], "token_ids": [7], "logprobs": {"top_logprobs": [{" a": -1.0}]}}
            ]
        },
    ],
)
def test_an_answer_without_what_was_asked_for_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        generation_of(answer)


def test_flags_and_keywords_say_the_same() -> None:
    engine = EngineArguments(enable_prefix_caching=True, max_num_seqs=4)
    flags = engine.flags()
    assert "--enable-prefix-caching" in flags
    assert "--no-enable-prefix-caching" in EngineArguments().flags()
    assert flags[flags.index("--max-num-seqs") + 1] == "4"
    options = {
        flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags if flag[:2] == "--"
    }
    assert options == engine.keywords().keys()


def test_both_plans_name_every_prompt_once() -> None:
    for plan in (ONE_AT_A_TIME, ALL_TOGETHER):
        assert sorted(index for batch in plan for index in batch) == list(range(len(PROMPTS)))


def test_the_child_command_carries_its_arguments_as_json(tmp_path: Any) -> None:
    words = command(tmp_path, tmp_path / "out", EngineArguments(), ALL_TOGETHER, {"worker_cls": "a.B"})
    values = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    assert json.loads(values["engine"]) == EngineArguments().keywords()
    assert json.loads(values["plan"]) == [list(range(8))]
    assert json.loads(values["extra"]) == {"worker_cls": "a.B"}
