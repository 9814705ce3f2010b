"""Columns of published data sets as rows of our tasks: SCP-116K, DeepScaleR, Eurus-2. Pure.

Sources: the data sets' cards on Hugging Face (EricLu/SCP-116K, agentica-org/DeepScaleR-Preview-Dataset,
PRIME-RL/Eurus-2-RL-Data). Answers of mathematics are not measured: they are compared as mathematics. Solutions and
model answers, which these files hold beside the question, are dropped here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from workflows.errors import TaskDataError
from workflows.grading.stated import ANY_MARK, stated_answer

Reader = Callable[[Mapping[str, Any], int], "dict[str, Any] | str | None"]
"""From a line's value and its number to columns of our own, or to what is wrong with it; None: another task's."""

_TOLD: Final = re.compile(r"\s*(?:Present the answer in LaTex format: \\boxed\{Your answer\})\s*$")
_WRITE: Final = re.compile(
    r"\s*Write Python code to solve the problem\. Present the code in\s+```python\s+Your code\s+```\s+at the end\.?\s*$"
)
"""What Eurus-2's prompts end with; our tasks say themselves how to answer."""
_FLOATS: Final = {"relative": 1e-5, "absolute": 1e-8}
"""PRIME's own tests compare numbers with a point so (numpy.allclose's defaults)."""


def reader(columns: str, task: str) -> Reader:
    """How a file with those columns is read.

    Args:
        columns: `rows` (our own), or a data set's name.
        task: stem or code; a data set need not have rows for both.

    Raises:
        TaskDataError: there are no such columns for this task.
    """
    known = _READERS[task]
    if columns not in known:
        raise TaskDataError(f"task.options.columns: got {columns!r}; allowed with task={task}: {', '.join(known)}")
    return known[columns]


def _own(line: Mapping[str, Any], number: int) -> dict[str, Any] | str:
    del number
    return dict(line)


def scp_116k(line: Mapping[str, Any], number: int) -> dict[str, Any] | str:
    """SCP-116K: `problem`, `domain`; the short answer is an extracted one, else what `solution` boxes."""
    question = line.get("problem")
    if not isinstance(question, str):
        return "column problem is missing, or no text"
    answer = next((line[name] for name in ("answer", "extracted_answer", "final_answer") if line.get(name)), None)
    if answer is None:
        solution = next((line[name] for name in ("solution", "matched_solution") if line.get(name)), "")
        answer = stated_answer(str(solution), ANY_MARK)
    if not isinstance(answer, str):
        return "neither an extracted answer nor one that the solution states"
    return {
        "task_id": f"scp-116k-{number}", "question": question, "answer": _bare(answer), "domain": line.get("domain"),
    }  # fmt: skip


def deepscaler(line: Mapping[str, Any], number: int) -> dict[str, Any] | str:
    """DeepScaleR: `problem`, `answer` (LaTeX), and `solution`, which is dropped."""
    question, answer = line.get("problem"), line.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(question, str) or not isinstance(answer, str):
        return "columns problem and answer must be texts"
    return {"task_id": f"deepscaler-{number}", "question": question, "answer": _bare(answer), "kind": "symbolic"}


def eurus_math(line: Mapping[str, Any], number: int) -> dict[str, Any] | str | None:
    """Eurus-2's rows of ability math: the last message of `prompt`, and `reward_model.ground_truth`."""
    read = _eurus(line, "math")
    if read is None or isinstance(read, str):
        return read
    question, truth = read
    return {
        "task_id": f"eurus-2-{number}", "question": _TOLD.sub("", question), "answer": _bare(truth),
        "kind": "symbolic",
    }  # fmt: skip


def eurus_code(line: Mapping[str, Any], number: int) -> dict[str, Any] | str | None:
    """Eurus-2's rows of ability code: `ground_truth` is JSON with inputs and outputs, and fn_name for functions."""
    read = _eurus(line, "code")
    if read is None or isinstance(read, str):
        return read
    question, truth = read
    try:
        tests = msgspec.json.decode(truth)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"reward_model.ground_truth is not JSON: {error}"
    if not isinstance(tests, dict) or not isinstance(tests.get("inputs"), list):
        return "reward_model.ground_truth has no inputs"
    if tests.get("fn_name") is not None:
        return f"its tests call a function (fn_name {tests['fn_name']!r}), not a program: not supported"
    return {
        "task_id": f"eurus-2-{number}", "question": _WRITE.sub("", question), "inputs": tests["inputs"],
        "outputs": tests.get("outputs"), "float_tolerance": _FLOATS["relative"],
        "float_absolute": _FLOATS["absolute"],
    }  # fmt: skip


def _eurus(line: Mapping[str, Any], ability: str) -> tuple[str, str] | str | None:
    """Question and truth; one file holds both abilities, a task takes its own."""
    if line.get("ability", ability) != ability:
        return None
    prompt, model = line.get("prompt"), line.get("reward_model")
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[-1], Mapping):
        return "column prompt must be a list of messages"
    if not isinstance(model, Mapping) or not isinstance(model.get("ground_truth"), str):
        return "column reward_model has no ground_truth"
    question = prompt[-1].get("content")
    return (question, model["ground_truth"]) if isinstance(question, str) else "the last message of prompt has no text"


def _bare(answer: str) -> str:
    """An answer without the box or the dollars around it."""
    answer = answer.strip()
    if answer.startswith(("\\boxed{", "\\fbox{")) and answer.endswith("}"):
        return stated_answer(answer, ANY_MARK) or answer
    return answer[1:-1].strip() if len(answer) > 2 and answer[0] == answer[-1] == "$" else answer


_READERS: Final[Mapping[str, Mapping[str, Reader]]] = {
    "stem": {"rows": _own, "scp-116k": scp_116k, "deepscaler": deepscaler, "eurus-2": eurus_math},
    "code": {"rows": _own, "eurus-2": eurus_code},
}
