"""The engine's HTTP through a real process: vLLM's JSON field by field, its refusals, aborts and metrics."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams, token_logprobs
from tests.support.engine_process import EngineProcess, generate, metric, running_engine, until
from tests.support.tiny_qwen import tiny_config, write_model
from tests.support.vllm_shapes import COMPLETION, GENERATE, check_shape

MAX_LEN = 2048
PROMPT = [1, 120, 118, 104, 117, 13, 107, 108, 2, 13, 1, 100, 118, 118]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", tiny_config(max_len=MAX_LEN))


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(model_dir, tmp_path_factory.mktemp("engine"), "--weight-version", "17") as process:
        yield process


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=30) as one:
        yield one


def test_generate_answers_as_vllm_does(client: httpx.Client) -> None:
    body = {
        "request_id": "traj-42-t3",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 1, "logprobs": 0, "ignore_eos": True},
    }
    response = client.post("/inference/v1/generate", json=body)
    answer = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    check_shape(answer, GENERATE)
    choice = answer["choices"][0]
    assert answer["request_id"] == "generate-tokens-traj-42-t3"
    assert (answer["model"], answer["output_mode"], choice["finish_reason"]) == ("tiny", "tokens", "length")
    assert choice["weight_versions"] == [{"version": "17", "start": 0, "end": 4}]
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
    assert all(len(one["top_logprobs"]) == 1 for one in choice["logprobs"]["content"])
    usage, length = answer["usage"], len(PROMPT)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (length, 4, length + 4)


def test_generate_without_logprobs_and_with_prompt_ids(client: httpx.Client) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "bogus": 3}, "return_token_ids": True}
    answer = client.post("/inference/v1/generate", json=body).json()
    assert answer["choices"][0]["logprobs"] is None
    assert answer["prompt_token_ids"] == PROMPT


def test_generate_in_text_mode(client: httpx.Client) -> None:
    sampling = {"max_tokens": 3, "seed": 1, "logprobs": 2, "ignore_eos": True}
    body = {"token_ids": PROMPT, "output_mode": "text", "sampling_params": sampling}
    answer = client.post("/inference/v1/generate", json=body).json()
    choice = answer["choices"][0]
    token = {"token": str, "logprob": float, "bytes": list}
    check_shape(choice["logprobs"], {"content": [{**token, "top_logprobs": [token]}]})
    assert (answer["output_mode"], type(choice["text"])) == ("text", str)
    assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "T=0.7 top_p=0.9"])
def test_recorded_logprobs_are_recomputed_from_the_checkpoint(
    client: httpx.Client, model_dir: Path, shape: dict[str, float]
) -> None:
    answer = generate(client, PROMPT, max_tokens=100, seed=5, logprobs=0, ignore_eos=True, **shape)
    content = answer["choices"][0]["logprobs"]["content"]
    tokens = [one["token_id"] for one in content]
    logits = Qwen3.load(model_dir).logits(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    again = token_logprobs(logits, tokens, SamplingParams(**shape))
    assert max(abs(one["logprob"] - float(other)) for one, other in zip(content, again, strict=True)) < 1e-4


def test_completions_answer_as_vllm_does(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 2, "return_token_ids": True}
    body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "traj-42-turn-3"}).json()
    check_shape(answer, COMPLETION)
    choice = answer["choices"][0]
    assert (answer["id"], answer["object"]) == ("cmpl-traj-42-turn-3", "text_completion")
    assert choice["prompt_token_ids"] == PROMPT
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    lists = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    for token, logprob, best in zip(*lists, strict=True):
        assert next(iter(best.items())) == (token, logprob)
        assert len(best) in (2, 3)


def test_completions_of_a_text_leave_ids_out_unless_asked(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "12 + 7", "max_tokens": 3, "temperature": 0}).json()
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["logprobs"]) == (None, None, None)
    assert answer["usage"]["prompt_tokens"] == 6
    ids = client.post("/tokenize", json={"prompt": "12 + 7"}).json()["tokens"]
    again = generate(client, ids, max_tokens=3, temperature=0)
    assert again["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_token_that_ends_is_in_the_ids_and_not_in_the_text(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, "seed": 3}
    body["stop_token_ids"] = list(range(3, 259))
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["token_ids"][0]
    assert (choice["text"], len(choice["token_ids"])) == ("", 1)


def test_tokenize(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True, "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
    assert answer["token_strs"][:6] == ["<|im_start|>", "u", "s", "e", "r", "Ċ"]
    assert answer["count"] == len(answer["tokens"])
    plain = client.post("/tokenize", json={"prompt": "<|im_start|>hi"}).json()
    assert plain["tokens"] == [1, 107, 108]
    assert plain["token_strs"] is None


def test_models_version_health(client: httpx.Client, model_dir: Path) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", str(model_dir), MAX_LEN)
    assert len(card["permission"][0]) == 12
    assert client.get("/version").json() == {"version": "0.32.0"}
    health = client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert client.get("/nope").json() == {"detail": "Not Found"}
    assert client.get("/v1/completions").status_code == 405


TOO_LONG = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 2100 input tokens, which "
    "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=2100)"
)
EMPTY = (
    "1 validation error:\n  {'type': 'too_short', 'loc': 'body.token_ids', 'msg': 'List should have at least 1 item "
    "after validation, not 0', 'input': '<list of 0 items>', 'ctx': {'field_type': 'List', 'min_length': 1, "
    "'actual_length': 0}}"
)
NO_TOKEN = "Token id 999999 is out of vocabulary"
LONG = [5] * 2100
TOO_MANY = "Requested sample logprobs of 1000, which is greater than max allowed: 20 (parameter=logprobs, value=1000)"
GENERATE_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param", "message"),
    [
        (GENERATE_PATH, {"token_ids": [], "sampling_params": {}}, 400, "Bad Request", "body.token_ids", EMPTY),
        (GENERATE_PATH, {"token_ids": LONG, "sampling_params": {}}, 400, "BadRequestError", "input_tokens", TOO_LONG),
        (COMPLETIONS_PATH, {"prompt": LONG}, 400, "BadRequestError", "input_tokens", TOO_LONG),
        (COMPLETIONS_PATH, {"prompt": []}, 400, "BadRequestError", None, "You must pass at least one prompt"),
        (COMPLETIONS_PATH, {"prompt": [5, 999999]}, 400, "BadRequestError", None, NO_TOKEN),
        (COMPLETIONS_PATH, {"prompt": [5], "logprobs": 1000}, 400, "BadRequestError", "logprobs", TOO_MANY),
        (
            COMPLETIONS_PATH,
            {"model": "nope", "prompt": [5]},
            404,
            "NotFoundError",
            "model",
            "The model `nope` does not exist. Valid aliases: tiny.",
        ),
    ],
)
def test_refusals_are_worded_as_vllm_words_them(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, kind: str, param: str | None, message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status
    assert response.json() == {"error": {"message": message, "type": kind, "param": param, "code": status}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{bad", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b'{"sampling_params": {}}', "body.token_ids"),
        (b'{"token_ids": "abc", "sampling_params": {}}', "body.token_ids"),
        (b'{"token_ids": [1, "a"], "sampling_params": {}}', "body.token_ids.1"),
        (b'{"token_ids": [1], "sampling_params": {"temperature": "hot"}}', "body.sampling_params.temperature"),
        (b'{"token_ids": [1], "sampling_params": {"temperature": -1}}', "temperature"),
        (b'{"token_ids": [1], "sampling_params": {"top_p": 0}}', "top_p"),
        (b'{"token_ids": [1], "sampling_params": {"max_tokens": 0}}', "max_tokens"),
        (b'{"token_ids": [1], "sampling_params": {"n": 0}}', "n"),
        (b'{"token_ids": [1], "sampling_params": {"stop": [""]}}', "stop"),
        (b'{"token_ids": [1], "sampling_params": {"repetition_penalty": 1.1}}', "repetition_penalty"),
        (b'{"token_ids": [1], "sampling_params": {"n": 2}, "stream": true}', "n"),
        (b'{"token_ids": [1], "sampling_params": {}, "output_mode": "audio"}', "output_mode"),
        (b'{"token_ids": [-1], "sampling_params": {}}', None),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(client: httpx.Client, body: bytes, param: str | None) -> None:
    response = client.post("/inference/v1/generate", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert client.get("/health").status_code == 200


def test_an_answer_ends_where_the_model_ends(client: httpx.Client) -> None:
    answer = generate(client, [5] * 2040, max_tokens=100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prefix_cache_counts_tokens(client: httpx.Client) -> None:
    before = metric(client, "prefix_cache_queries_total"), metric(client, "prefix_cache_hits_total")
    prompt = [77, *range(10, 74)]
    assert generate(client, prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert generate(client, prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    after = metric(client, "prefix_cache_queries_total"), metric(client, "prefix_cache_hits_total")
    assert (after[0] - before[0], after[1] - before[1]) == (130, 64)


def test_seeded_requests_do_not_depend_on_company(client: httpx.Client) -> None:
    def ask(seed: int) -> list[int]:
        answer = generate(client, [*PROMPT, seed + 3], max_tokens=40, seed=seed, ignore_eos=True)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    alone = [ask(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone
    unseeded = {tuple(generate(client, PROMPT, max_tokens=20)["choices"][0]["token_ids"]) for _ in range(3)}
    assert len(unseeded) == 3


def test_a_client_that_goes_takes_its_request_along(engine: EngineProcess, client: httpx.Client) -> None:
    sampling = {"max_tokens": 2000, "ignore_eos": True}
    body = json.dumps({"token_ids": [5] * 40, "sampling_params": sampling}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    port = int(engine.url.rpartition(":")[2])
    generated = metric(client, "generation_tokens_total")
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    for connection in connections:
        connection.sendall(head + body)
    until(lambda: metric(client, "num_requests_running") == 4, "four requests run")
    for connection in connections:
        connection.close()
    until(lambda: metric(client, "num_requests_running") == 0, "none runs")
    assert metric(client, "generation_tokens_total") - generated < 4 * 2000
    assert metric(client, "kv_cache_usage_perc") == 0
