"""What every engine must do: one suite for the embedded engine and for a real vLLM. A difference is a bug of ours.

A subclass in a test module names the fixture `engine`; both engines serve the shipped policy `tiny` under its name,
behind a key, with the development routes on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

import workflows.policies
from stages.chat import ChatTokenizer
from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams, token_logprobs
from stages.engine_client import EngineClient
from stages.engine_control import EngineControl, WeightsError, check_weights
from stages.model import StreamModel
from stages.trajectory import Chain, Message, Sampling
from stages.wire import SessionOut
from tests.support.vllm_shapes import CHAT, COMPLETION, GENERATE, check_shape
from tests.support.waiting import eventually, poll
from workflows.tools.bash import SCHEMA

POLICIES = Path(workflows.policies.__file__).parent
TINY, HALF = POLICIES / "tiny", POLICIES / "tiny-half"
GENERATE_PATH, COMPLETIONS_PATH, CHAT_PATH = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
CHAT_TOKENS = ChatTokenizer.load(TINY)
PROMPT = CHAT_TOKENS.encode(CHAT_TOKENS.render([Message("user", "12 + 7 - 4 = ?")], [SCHEMA]))
MESSAGES = [{"role": "user", "content": "12 + 7 - 4 = ?"}]
TOOLS = [dict(SCHEMA)]
CONTEXT = 2048
WAIT_S = 240.0
TRIES = 5
"""Of a generation that is to be met amid its tokens: a busy server may tell that it draws when all is drawn."""


@dataclass
class Engine:
    """A running engine of the suite.

    `block` is the number of tokens of a block of its prefix cache, `long` that of a generation that must still run when
    something else has been seen, on a busy machine too.
    """

    url: str
    key: str
    block: int
    long: int = 1000
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)

    def post(self, path: str, body: Any = None, **query: str) -> Any:
        """A POST that must succeed; its decoded answer, None where it is empty."""
        response = self.client.post(path, json=body, params=query)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def generate(self, prompt: list[int], name: str | None = None, **params: Any) -> Any:
        """The answer of /inference/v1/generate."""
        named = {} if name is None else {"request_id": name}
        return self.post(GENERATE_PATH, {"token_ids": prompt, **named, "sampling_params": params})

    def metric(self, name: str) -> float:
        """One value of /metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"vllm:{name}{{"):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def control(self, act: Callable[[EngineControl], Any]) -> Any:
        """Something done by the product's own control client."""

        async def body() -> Any:
            async with EngineControl(api_key=self.key) as control:
                return await act(control)

        return asyncio.run(body())

    def idle(self) -> None:
        """Wait until nothing runs."""
        poll(lambda: self.metric("num_requests_running") == 0, "nothing runs", WAIT_S, 0.02)

    @contextmanager
    def generating(self, *, name: str | None = None, **params: Any) -> Iterator[Future[Any]]:
        """A long generation that has begun to draw; the block must see to its end."""
        body = {"max_tokens": self.long, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "seed": 7, **params}
        with ThreadPoolExecutor(1) as pool:
            for _ in range(TRIES):
                self.idle()
                before = self.metric("generation_tokens_total")
                asked = pool.submit(self.generate, PROMPT, name, **body)
                while not asked.done() and self.metric("generation_tokens_total") <= before + 5:
                    wait([asked], 0.01)  # its own time-out ends it
                if not asked.done():
                    break
            assert not asked.done(), asked.result()
            yield asked


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose last line is [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def recomputed(model: Qwen3, prompt: list[int], choice: dict[str, Any], params: SamplingParams) -> float:
    """The largest difference of reported log-probs to those of the model over the whole sequence."""
    ids = choice["token_ids"]
    logits = model.logits(prompt + ids)[len(prompt) - 1 : -1]
    again = token_logprobs(logits, ids, params)
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return max(abs(one - float(other)) for one, other in zip(told, again, strict=True))


def endless(policy: Path, copy: Path) -> Path:
    """The policy without a reason to end a turn: the logit of the id that ends it is 0, the highest far above."""
    shutil.copytree(policy, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][sorted(CHAT_TOKENS.eos_ids)] = 0.0
    save_file(tensors, copy / "model.safetensors")
    return copy


class EngineSuite:
    """The suite; `engine` is a fixture of the module that subclasses it."""

    def test_generate_has_its_shape(self, engine: Engine) -> None:
        answer = engine.generate(PROMPT, "traj-1", max_tokens=4, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
        check_shape(answer, GENERATE)
        choice = answer["choices"][0]
        assert (answer["request_id"], answer["model"], choice["finish_reason"]) == (
            "generate-tokens-traj-1", "tiny", "length",
        )  # fmt: skip
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, 4)]

    def test_generate_as_text_and_in_copies(self, engine: Engine) -> None:
        body = {"token_ids": PROMPT, "output_mode": "text", "return_token_ids": True}
        body["sampling_params"] = {"max_tokens": 3, "temperature": 1.0, "seed": 1, "n": 2, "logprobs": 1}
        answer = engine.post(GENERATE_PATH, body)
        assert (answer["output_mode"], answer["prompt_token_ids"]) == ("text", PROMPT)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(isinstance(choice["text"], str) for choice in answer["choices"])
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)

    def test_completions_have_their_shape(self, engine: Engine) -> None:
        body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 2, "return_token_ids": True}
        answer = engine.post(COMPLETIONS_PATH, {**body, "ignore_eos": True, "return_tokens_as_token_ids": True})
        check_shape(answer, COMPLETION)
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]

    def test_completions_of_several_prompts_and_scores_of_one(self, engine: Engine) -> None:
        body = {"prompt": [PROMPT, PROMPT[:8]], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
        answer = engine.post(COMPLETIONS_PATH, body)
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [PROMPT, PROMPT[:8]]
        scored = engine.generate(PROMPT[:6], max_tokens=1, temperature=0, prompt_logprobs=0)["prompt_logprobs"]
        expected = token_logprobs(Qwen3.load(TINY).logits(PROMPT[:6])[:-1], PROMPT[1:6], SamplingParams())
        told = [next(iter(entry.values()))["logprob"] for entry in scored[1:]]
        assert scored[0] is None and told == pytest.approx(expected.tolist(), abs=1e-4)

    def test_a_chat_with_tools_has_its_shape(self, engine: Engine) -> None:
        body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 60, "return_token_ids": True}
        answer = engine.post(CHAT_PATH, {**body, "logprobs": True, "top_logprobs": 0})
        check_shape(answer, CHAT)
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "bash"
        assert list(json.loads(call["function"]["arguments"])) == ["command"]
        assert answer["prompt_token_ids"] == PROMPT
        whole = engine.generate(PROMPT, max_tokens=60, temperature=0)["choices"][0]
        assert choice["token_ids"] == whole["token_ids"]
        assert choice["logprobs"]["content"][0]["token"] == CHAT_TOKENS.decode(whole["token_ids"][:1])

    def test_a_chat_goes_on_after_a_tool(self, engine: Engine) -> None:
        call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "echo 15"}'}}
        said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        history = [*MESSAGES, *said, {"role": "tool", "tool_call_id": "c0", "content": "15"}]
        body = {"messages": history, "tools": TOOLS, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = engine.post(CHAT_PATH, {**body, "tool_choice": "none"})
        rendered = engine.post("/tokenize", {"messages": history, "tools": TOOLS, "add_generation_prompt": True})
        assert answer["prompt_token_ids"] == rendered["tokens"]
        assert answer["choices"][0]["message"]["content"].startswith("The answer is")
        assert "tool_calls" not in answer["choices"][0]["message"]

    def test_streams_say_what_whole_answers_say(self, engine: Engine) -> None:
        sampling = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
        whole = engine.generate(PROMPT, **sampling)["choices"][0]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"token_ids": PROMPT, "sampling_params": sampling, **options}
        *chunks, last = events(engine.client.post(GENERATE_PATH, json=body))
        assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
        assert chunks[-1]["choices"][0]["weight_versions"] == whole["weight_versions"]
        assert last["usage"]["completion_tokens"] == len(whole["token_ids"]) and last["choices"] == []
        assert list(chunks[0]["choices"][0]) == [
            "index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask",
            "weight_versions", "logprobs",
        ]  # fmt: skip
        text = {"prompt": PROMPT, "return_token_ids": True, **sampling}
        answer = engine.post(COMPLETIONS_PATH, text)["choices"][0]
        *chunks, _ = events(engine.client.post(COMPLETIONS_PATH, json={**text, **options}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["text"]
        assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == PROMPT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    def test_a_streamed_chat_adds_up(self, engine: Engine) -> None:
        body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        for tools in ({}, {"tools": TOOLS}):
            whole = engine.post(CHAT_PATH, {**body, **tools})["choices"][0]
            first, *chunks = events(engine.client.post(CHAT_PATH, json={**body, **tools, "stream": True}))
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(one.get("content") or "" for one in deltas) == (whole["message"]["content"] or "")
            called = [call["function"] for one in deltas for call in one.get("tool_calls", [])]
            arguments = "".join(one.get("arguments", "") for one in called)
            expected = whole["message"].get("tool_calls", [])
            assert [one["name"] for one in called if "name" in one] == [one["function"]["name"] for one in expected]
            assert arguments == "".join(one["function"]["arguments"] for one in expected)
            assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
            assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == whole["token_ids"]

    def test_tokenize_and_detokenize(self, engine: Engine) -> None:
        asked = {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": True, "return_token_strs": True}
        answer = engine.post("/tokenize", asked)
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (PROMPT, len(PROMPT), CONTEXT)
        assert answer["token_strs"] == [CHAT_TOKENS.token(one) for one in PROMPT]
        assert engine.post("/detokenize", {"tokens": PROMPT}) == {"prompt": CHAT_TOKENS.decode(PROMPT)}

    @pytest.mark.parametrize(
        ("path", "body", "status", "kind", "param", "message"),
        [
            (GENERATE_PATH, {"token_ids": [], "sampling_params": {}}, 400, "Bad Request", "body.token_ids",
             "1 validation error:\n  {'type': 'too_short', 'loc': 'body.token_ids', 'msg': 'List should have at least "
             "1 item after validation, not 0', 'input': '<list of 0 items>', 'ctx': {'field_type': 'List', "
             "'min_length': 1, 'actual_length': 0}}"),
            (GENERATE_PATH, {"token_ids": [5], "sampling_params": {"max_tokens": 0}}, 400, "BadRequestError",
             "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
            (COMPLETIONS_PATH, {"prompt": [5] * 2100}, 400, "BadRequestError", "input_tokens",
             "This model's maximum context length is 2048 tokens. However, your prompt contains 2100 input tokens, "
             "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
             "(parameter=input_tokens, value=2100)"),
            (COMPLETIONS_PATH, {"prompt": []}, 400, "BadRequestError", None, "You must pass at least one prompt"),
            (COMPLETIONS_PATH, {"prompt": [5, 999999]}, 400, "BadRequestError", None,
             "Token id 999999 is out of vocabulary"),
            (CHAT_PATH, {"messages": []}, 400, "BadRequestError", None,
             "Cannot apply chat template to an empty conversation. Provide at least one message."),
            (CHAT_PATH, {"model": "nope", "messages": MESSAGES}, 404, "NotFoundError", "model",
             "The model `nope` does not exist. Valid aliases: tiny."),
            (GENERATE_PATH, {"token_ids": [5], "request_id": None, "sampling_params": {}}, 400, "Bad Request",
             "body.request_id", "1 validation error:\n  {'type': 'string_type', 'loc': 'body.request_id', 'msg': "
             "'Input should be a valid string', 'input': 'None'}"),
            ("/pause?mode=xyz", {}, 400, "Bad Request", "query.mode",
             "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be 'abort', "
             "'wait' or 'keep'\", 'input': 'xyz', 'ctx': {'expected': \"'abort', 'wait' or 'keep'\"}}"),
        ],
        ids=[
            "empty", "no token", "too long", "no prompt", "no such token", "no message", "no such model", "null id",
            "no mode",
        ],
    )  # fmt: skip
    def test_refusals_are_the_same(
        self, engine: Engine, path: str, body: Any, status: int, kind: str, param: str | None, message: str
    ) -> None:
        response = engine.client.post(path, json=body)
        assert response.status_code == status
        assert response.json() == {"error": {"message": message, "type": kind, "param": param, "code": status}}

    def test_strings_and_ids_end_an_answer(self, engine: Engine) -> None:
        greedy = engine.generate(PROMPT, max_tokens=12, temperature=0)["choices"][0]["token_ids"]
        by_id = engine.generate(PROMPT, max_tokens=12, temperature=0, stop_token_ids=[greedy[3]])["choices"][0]
        assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", greedy[3])
        assert by_id["token_ids"] == greedy[: greedy.index(greedy[3]) + 1]
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop": ['"bash'], "return_token_ids": True}
        choice = engine.post(COMPLETIONS_PATH, body)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"bash')
        # The tool-call tag is an ordinary added token: it stays in the text that the stop string cuts.
        assert choice["text"] == CHAT_TOKENS.decode(greedy).partition('"bash')[0]
        assert choice["token_ids"] == greedy[: len(choice["token_ids"])]

    def test_the_context_ends_an_answer(self, engine: Engine) -> None:
        prompt = [PROMPT[n % len(PROMPT)] for n in range(CONTEXT - 6)]
        choice = engine.generate(prompt, max_tokens=50, ignore_eos=True)["choices"][0]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 6)

    @pytest.mark.parametrize("shape", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "T=0.7 top_p=0.9"])
    def test_log_probs_are_those_of_the_distribution_sampled_from(
        self, engine: Engine, shape: dict[str, float]
    ) -> None:
        model = Qwen3.load(TINY)
        for seed in (1, 2):
            answer = engine.generate(PROMPT, max_tokens=100, seed=seed, logprobs=0, ignore_eos=True, **shape)
            (choice,) = answer["choices"]
            assert recomputed(model, PROMPT, choice, SamplingParams(**shape)) < 1e-4
            assert min(entry["logprob"] for entry in choice["logprobs"]["content"]) < -0.1

    def test_a_repeated_prompt_is_cached_by_blocks(self, engine: Engine) -> None:
        engine.idle()
        assert engine.post("/reset_prefix_cache") == {"success": True}
        prompt = (PROMPT * 3)[: 2 * engine.block + 5]
        queries, hits = engine.metric("prefix_cache_queries_total"), engine.metric("prefix_cache_hits_total")
        cached = [
            engine.generate(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)
        ]
        assert cached == [0, 2 * engine.block]
        assert engine.metric("prefix_cache_queries_total") - queries == 2 * len(prompt)
        assert engine.metric("prefix_cache_hits_total") - hits == 2 * engine.block

    def test_the_metrics_that_a_router_reads_are_there(self, engine: Engine) -> None:
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
            "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
        ):  # fmt: skip
            assert engine.metric(name) >= 0
        values = engine.control(lambda control: control.metrics(engine.url))
        assert values["vllm:generation_tokens_total"] == engine.metric("generation_tokens_total")

    def test_pausing_freezes_and_resuming_goes_on(self, engine: Engine) -> None:
        with engine.generating() as asked:
            assert engine.post("/pause", mode="keep") == {"status": "paused"}
            drawn = engine.metric("generation_tokens_total")
            late: list[Any] = []
            newcomer = threading.Thread(target=lambda: late.append(engine.generate(PROMPT, max_tokens=2)))
            newcomer.start()
            assert engine.client.get("/is_paused").json() == {"is_paused": True}
            assert engine.client.get("/health").status_code == 200
            newcomer.join(0.3)
            assert newcomer.is_alive() and not asked.done() and not late
            assert engine.metric("generation_tokens_total") == drawn
            assert engine.post("/resume") == {"status": "resumed"}
            choice = asked.result(WAIT_S)["choices"][0]
            newcomer.join(WAIT_S)
        assert len(choice["token_ids"]) == engine.long and late[0]["choices"][0]["token_ids"]
        assert recomputed(Qwen3.load(TINY), PROMPT, choice, SamplingParams()) < 1e-4
        assert engine.client.get("/is_paused").json() == {"is_paused": False}

    def test_pausing_may_wait_or_abort(self, engine: Engine) -> None:
        with engine.generating() as asked:
            engine.post("/pause", mode="wait")
            assert len(asked.result(WAIT_S)["choices"][0]["token_ids"]) == engine.long
            engine.post("/resume")
        with engine.generating() as asked:
            engine.post("/pause", mode="abort")
            choice = asked.result(WAIT_S)["choices"][0]
            engine.post("/resume")
        assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < engine.long

    def test_an_aborted_request_gives_what_it_drew(self, engine: Engine) -> None:
        with engine.generating(name="to-abort") as asked:
            engine.control(lambda control: control.abort(engine.url, ["generate-tokens-to-abort"]))
            choice = asked.result(WAIT_S)["choices"][0]
        assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < engine.long
        assert recomputed(Qwen3.load(TINY), PROMPT, choice, SamplingParams()) < 1e-4

    def test_a_client_that_goes_takes_its_request_along(self, engine: Engine) -> None:
        engine.idle()
        body = {"token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 1900, "ignore_eos": True}}
        with engine.client.stream("POST", GENERATE_PATH, json=body) as response:
            chunks = response.iter_bytes()  # held: the connection closes with it
            assert next(chunks)
            assert engine.metric("num_requests_running") == 1
        drawn = engine.metric("generation_tokens_total")
        engine.idle()
        assert engine.metric("generation_tokens_total") < drawn + 1000

    def test_new_weights_in_mid_generation_make_two_spans_each_right(self, engine: Engine) -> None:
        engine.control(lambda control: control.stamp(engine.url, 17))
        assert engine.control(lambda control: control.weight_version(engine.url)) == "17"
        try:
            with engine.generating() as asked:
                engine.control(lambda control: control.swap(engine.url, 18, HALF))
                choice = asked.result(WAIT_S)["choices"][0]
        finally:
            engine.control(lambda control: control.swap(engine.url, 19, TINY))
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"]) == ("17", "18")
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], engine.long)
        ids, told = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        for span, directory in ((first, TINY), (second, HALF)):
            logits = Qwen3.load(directory).logits(PROMPT + ids)[len(PROMPT) - 1 : -1]
            again = token_logprobs(logits, ids, SamplingParams())
            within = range(span["start"], span["end"])
            assert max(abs(told[n] - float(again[n])) for n in within) < 1e-4, span

    async def test_new_weights_in_mid_turn_leave_one_trajectory_each_span_right(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        weights = {17: endless(TINY, tmp_path / "tiny"), 18: endless(HALF, tmp_path / "half")}
        # After a thousand tokens of float32 two engines differ by 1e-4 with no fault of either.
        sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=min(400, engine.long), seed=7)

        async def open_session(failed: str | None) -> SessionOut:
            return SessionOut("1", "r", engine.url, 17)

        async with EngineClient(api_key=engine.key) as client, EngineControl(api_key=engine.key) as control:

            async def swapped() -> Chain:
                """A turn in which the weights were swapped, or one that was over by then."""
                model = StreamModel(client, open_session, CHAT_TOKENS, sampling, name="t")
                await control.swap(engine.url, 17, weights[17])
                drawn = engine.metric("generation_tokens_total")
                asked = asyncio.create_task(model.generate(messages=[Message("user", "12 + 7 = ?")], tools=[SCHEMA]))
                await eventually(
                    lambda: asked.done() or engine.metric("generation_tokens_total") > drawn + 5, "it draws", WAIT_S
                )
                await control.swap(engine.url, 18, weights[18])
                await asyncio.wait_for(asked, WAIT_S)
                (chain,) = model.trajectory().chains
                return chain

            try:
                for _ in range(TRIES):
                    chain = await swapped()
                    if [span.version for span in chain.policy_versions] != [17]:
                        break
            finally:
                await control.swap(engine.url, 19, TINY)
        (turn,) = chain.turns
        first, second = chain.policy_versions
        assert (first.version, first.start, second.version, second.end) == (17, turn.start, 18, turn.end)
        assert first.start < first.end == second.start < second.end
        assert [n for n, drawn in enumerate(chain.loss_mask) if drawn] == list(range(turn.start, turn.end))
        shape = SamplingParams(temperature=0.7, top_p=0.9)
        for span in (first, second):
            logits = Qwen3.load(weights[span.version]).logits(chain.token_ids)[:-1]
            again = token_logprobs(logits, chain.token_ids[1:], shape)
            within = range(span.start, span.end)
            assert max(abs(chain.logprobs[n] - float(again[n - 1])) for n in within) < 1e-4, span

    def test_weights_that_cannot_be_loaded_never_reach_the_engine(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:-1])
        with pytest.raises(WeightsError, match=r"model\.safetensors: has \d+ bytes"):
            check_weights(tmp_path)
        with pytest.raises(WeightsError, match=r"config\.json: cannot be read"):
            check_weights(tmp_path / "none")
        check_weights(TINY, allow_tied=False)
        assert engine.generate(PROMPT, max_tokens=1)["choices"]

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", GENERATE_PATH), ("POST", COMPLETIONS_PATH), ("POST", CHAT_PATH), ("GET", "/v1/models"),
            ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"), ("POST", "/pause"),
            ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/collective_rpc"), ("GET", "/weight_info"),
            ("POST", "/update_weight_version"), ("POST", "/reset_prefix_cache"), ("POST", "/abort_requests"),
            ("POST", "/inference/v1/abort_requests"), ("GET", "/nowhere"),
        ],
    )  # fmt: skip
    def test_nothing_is_done_or_told_without_the_key(self, engine: Engine, method: str, path: str) -> None:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": engine.key}):
            assert httpx.request(method, engine.url + path, headers=header, timeout=10).status_code == 401
        assert httpx.get(engine.url + "/health", timeout=10).status_code == 200

    async def test_a_conversation_is_one_stream(self, engine: Engine) -> None:
        async def open_session(failed: str | None) -> SessionOut:
            return SessionOut("1", "r", engine.url, 0)

        async with EngineClient(api_key=engine.key) as client:
            model = StreamModel(client, open_session, CHAT_TOKENS, Sampling(temperature=0.0), name="t")
            messages = [Message("user", "12 + 7 = ?")]
            reply = await model.generate(messages=messages, tools=[SCHEMA])
            (call,) = reply.tool_calls
            messages += [reply, Message("tool", "19", tool_call_id=call.id)]
            reply = await model.generate(messages=messages, tools=[SCHEMA])
        assert "19" in reply.content
        (chain,) = model.trajectory().chains
        assert len(chain.turns) == 2 and len(chain.policy_versions) == 2
        assert chain.turns[1].cached_tokens >= engine.block
        logits = Qwen3.load(TINY).logits(chain.token_ids)[:-1]
        again = token_logprobs(logits, chain.token_ids[1:], SamplingParams(temperature=0.0))
        sampled = [n for n in range(1, len(chain.token_ids)) if chain.loss_mask[n]]
        assert max(abs(chain.logprobs[n] - float(again[n - 1])) for n in sampled) < 1e-4
