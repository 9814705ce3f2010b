"""Turns messages into text and text into token ids: tokenizer, chat template, and the bridge between two turns."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import msgspec
from tokenizers import Tokenizer

from stages.errors import StageError
from stages.toolformats import ToolFormat, format_of, parse_calls
from stages.trajectory import Message, ToolCall

MessageLike = Message | Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_TEXTS, _TEXT_BYTES = 1024, 4096  # how many JSON texts are remembered, and of which length at most
_PROBE = "probe-5d1f"  # a content that no template changes or contains: finds what stands after an assistant's


class ChatError(StageError):
    """A model directory has no usable tokenizer or chat template, or the template refuses the messages."""


class ChatTokenizer:
    """A model's tokenizer and chat template, rendered as `transformers` renders it.

    Args:
        tokenizer: the Hugging Face tokenizer.
        template: source of the Jinja chat template.
        eos_ids: ids that end a generation.
        digest: sha256 of tokenizer.json.
        special_tokens: names that the template may use, such as `bos_token` and `eos_token`.

    Raises:
        ChatError: the template cannot be compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        eos_ids: frozenset[int],
        *,
        digest: str = "",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self.eos_ids = eos_ids
        self.digest = digest
        self.tool_format: ToolFormat = format_of(template)
        self.template_digest = hashlib.sha256(template.encode()).hexdigest()
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template is no valid Jinja: {error}") from error
        self._template.globals = dict(self._template.globals)  # copied by each rendering: a dict, not a chain of them
        self._turn_tail: str | None = None
        # A group's rollouts begin with one prompt: the last ones' ids are remembered, and not to be changed.
        self.encode_prompt: Callable[[str], list[int]] = functools.lru_cache(maxsize=16)(self.encode)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTokenizer:
        """Read tokenizer.json, the template and the eos ids from a model directory.

        Raises:
            ChatError: a file is missing or unreadable, or no file names an end-of-sequence token.
        """
        path = model_dir / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ChatError(f"{path}: cannot be read ({error.strerror}); give a model directory with one") from error
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the Rust library raises Exception itself; this is the boundary to it
            raise ChatError(f"{path}: not a tokenizer file: {error}") from error
        configs = {name: _read_json(model_dir / name) for name in _CONFIGS}
        tokenizer_config = configs["tokenizer_config.json"]
        return cls(
            tokenizer,
            _find_template(model_dir, tokenizer_config),
            _find_eos(model_dir, configs, tokenizer),
            digest=hashlib.sha256(content).hexdigest(),
            special_tokens=_special_tokens(tokenizer_config),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added in front or behind. Other threads go on meanwhile."""
        # A batch of one: alone of the two it lets go of the interpreter's lock, which large texts hold for seconds.
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens kept; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id (byte-level: a leading space shows as U+0120).

        Raises:
            ChatError: the id is not in the vocabulary.
        """
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            raise ChatError(f"token id {token_id} is not in the vocabulary of {self.vocab_size}")
        return str(token)

    def render(
        self, messages: Sequence[MessageLike], tools: Tools | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The text that the template makes of `messages`.

        Raises:
            ChatError: the template refused them.
        """
        values = [_as_template_value(message) for message in messages]
        try:
            return self._template.render(
                messages=values,
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(f"the chat template refused {len(values)} messages: {error}") from error

    @property
    def turn_tail(self) -> str:
        """What the template puts behind an assistant's content, for example "<|im_end|>" and a newline."""
        if self._turn_tail is None:
            probe = [Message("user", "hello"), Message("assistant", _PROBE)]
            _, found, tail = self.render(probe, add_generation_prompt=False).rpartition(_PROBE)
            if not found:
                raise ChatError("the chat template does not show an assistant's content")
            self._turn_tail = tail
        return self._turn_tail

    def bridge(
        self, previous: Sequence[MessageLike], new: Sequence[MessageLike], tools: Tools | None, ended: bool
    ) -> str | None:
        """Text that follows the sampled tokens of `previous`'s last assistant message, so that `new` comes next.

        It is the difference of two renderings, so the sampled tokens themselves are never rendered anew.

        Args:
            previous: the messages so far; the last one was sampled.
            new: tool results or user messages that follow it.
            tools: the schemas that stand in the prompt.
            ended: whether the end-of-turn token was itself sampled; it is then not said twice.

        Returns:
            The text, with a generation prompt at its end; None where the template rewrites what came before (some drop
            old reasoning): the caller then starts a new chain.
        """
        before = self.render(previous, tools, add_generation_prompt=False)
        after = self.render([*previous, *new], tools, add_generation_prompt=True)
        return self._tail_after(ended) + after[len(before) :] if after.startswith(before) else None

    def _tail_after(self, ended: bool) -> str:
        if ended:
            for eos_id in sorted(self.eos_ids):
                eos = self._tokenizer.id_to_token(eos_id)
                if eos and self.turn_tail.startswith(eos):
                    return self.turn_tail[len(eos) :]
        return self.turn_tail


def parse_tool_calls(text: str, form: ToolFormat = "hermes") -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a sampled text in the format of its model."""
    return parse_calls(text, form)


_CONFIGS = ("generation_config.json", "config.json", "tokenizer_config.json")
"""Where eos ids are looked for, the first that names one wins."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, answering as it does but sooner: two thirds of a rendering were its questions about attributes.

    What a message's keys name is no attribute of dicts; of the types below, an attribute's name says if it is safe.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See Jinja's."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is jinja2.runtime.LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See Jinja's."""
        kind = type(obj)
        if (safe := self._known.get((kind, attr))) is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if kind in _REMEMBERED and len(self._known) < 1024:
                self._known[kind, attr] = safe
        return safe


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0"})
_REMEMBERED = frozenset({str, dict, list, jinja2.runtime.LoopContext, jinja2.utils.Namespace})


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja set up as `transformers` sets it up: templates are written against exactly this."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """Lets `{% generation %}...{% endgeneration %}` stand in a template: it shows its body as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is None and separators is None and not (ensure_ascii or sort_keys):
        return _remembered_json(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_plain_json = json.JSONEncoder(ensure_ascii=False).encode
_texts: dict[bytes, str] = {}


def _remembered_json(value: Any) -> str:
    """Schemas and the arguments of calls come again in every rendering of a conversation."""
    try:
        key = msgspec.msgpack.encode(value)  # which, unlike JSON, tells any two values apart
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _plain_json(value)
    if (text := _texts.get(key)) is None:
        text = _plain_json(value)
        if len(key) <= _TEXT_BYTES:
            _texts[key] = text
        if len(_texts) > _TEXTS:
            del _texts[next(iter(_texts))]
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _as_template_value(message: MessageLike) -> dict[str, Any]:
    """A message as templates expect it: OpenAI's shape, calls that could not be read left to the content."""
    if not isinstance(message, Message):
        return dict(message)
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
        if call.error is None
    ]
    if calls:
        value["tool_calls"] = calls
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        value["name"] = message.name
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ChatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _find_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        # The older form names several templates; "default" is the one that chat uses.
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if isinstance(template, str) and template:
        return template
    raise ChatError(
        f"{model_dir}: no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json; "
        "a base model without one cannot be an agent"
    )


def _find_eos(model_dir: Path, configs: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that generation_config.json or config.json ends at, with the tokenizer's own end token."""
    found: set[int] = set()
    for name in _CONFIGS[:2]:
        value = configs[name].get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
            break
    token = _special_tokens(configs["tokenizer_config.json"]).get("eos_token")
    token_id = tokenizer.token_to_id(token) if token else None
    if token_id is not None:
        found.add(token_id)
    if not found:
        raise ChatError(f"{model_dir}: none of {', '.join(_CONFIGS)} names an end-of-sequence token")
    return frozenset(found)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, which stand as text or as an object with `content`."""
    read: Callable[[Any], Any] = lambda value: value.get("content") if isinstance(value, dict) else value  # noqa: E731
    tokens = {key: read(value) for key, value in tokenizer_config.items() if key.endswith("_token")}
    return {key: value for key, value in tokens.items() if isinstance(value, str)}
