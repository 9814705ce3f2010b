"""The reference trainer's loop: ask, wait, learn, push; by the public client and reader alone.

Order makes it safe to kill at any moment: weights, then optimizer, then the state that names both, then the push. What
was asked for is asked for again under the same keys; an update that was not in the state is computed again from the
same groups; a version that is in the state and not on the fleet is pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.training import Train
from stages import sharedfs
from stages.chat import ChatTokenizer
from stages.client import AsyncRolloutClient
from stages.errors import ServiceError
from workflows.evaluate import evaluate, wilson
from workflows.train import samples as data
from workflows.train.collecting import Collector, Reader, Wave, wave_size
from workflows.train.learning import Learner, Prepared, Stats
from workflows.train.records import Places, Record, State, read_state, table_text, write_state

log = logging.getLogger(__name__)

TAG, HELDOUT_TAG = "train", "heldout"
HELDOUT_PRIORITY = 80
"""Above training's: a measurement is of one version, so it does not wait behind rollouts for the next."""
_SMOOTHING = 0.3


@dataclass(frozen=True)
class Plan:
    """What a trainer is told beside its own keys."""

    run_dir: Path
    run_id: str
    group_size: int
    seed: int
    sampling: Mapping[str, Any]
    """Of the held-out measurements: temperature, top_p, max_tokens, seed."""
    max_open: int
    """Rollouts that the router takes at once: no wave is larger."""
    visibility_s: float


class Trainer:
    """One trainer of one run, over any number of lives.

    Args:
        settings: its keys.
        plan: what else it is told.
        learner: the policy, with the weights of version 0.
        chat: its tokenizer, for counting what encoding again would change.
        task_ids: the data set.
        heldout: tasks with their rows, for measuring.
        clock: of every time that is limited or recorded.
    """

    def __init__(
        self, settings: Train, plan: Plan, learner: Learner, chat: ChatTokenizer, task_ids: Sequence[str],
        heldout: Sequence[Mapping[str, Any]], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._settings, self._plan, self._learner, self._chat = settings, plan, learner, chat
        self._task_ids, self._heldout, self._clock = task_ids, heldout, clock
        self._places = Places(plan.run_dir)
        self._state = State()
        self._past: dict[int, Any] = {}
        """Weights of the last versions, by version: what the tokens of a lagging rollout are checked against."""

    async def to_the_end(self, client: AsyncRolloutClient, reader: Reader) -> State:
        """Train until the last update or the time limit; returns the state with all records.

        Raises:
            RouterUnreachableError: no router answered for the client's patience.
            ServiceError: the router refused a task or a version.
            TrainError: the policy cannot be trained on.
        """
        await asyncio.to_thread(self._open)
        state = self._state
        await self._push(client)
        collector = Collector(
            client, reader, self._task_ids, key=f"train-{self._plan.run_id}", group_size=self._plan.group_size,
            tag=TAG, seed=self._plan.seed, after=state.seq, visibility_s=self._plan.visibility_s,
        )  # fmt: skip
        while True:
            await self._measure_if_due(client)
            if self._is_over:
                await self._measure_if_due(client)  # where a probe's own seconds were the last: all problems
                break
            await self._cycle(client, collector)
        if state.ahead is not None:
            for group_id in await collector.submit(state.ahead):
                with contextlib.suppress(ServiceError):  # closed meanwhile
                    await client.cancel(group_id=group_id)
        await asyncio.to_thread(self._save)
        return state

    @property
    def _is_over(self) -> bool:
        limit_s = self._settings.stop_after_s
        return self._state.version >= self._settings.steps or (limit_s is not None and self._state.elapsed_s >= limit_s)

    def _open(self) -> None:
        """Begin, or go on from what was left."""
        found = read_state(self._places)
        if found is None:
            sharedfs.make_dirs(self._places.root)
            self._state.records.append(Record(step=0))
            self._past[0] = self._learner.snapshot()
            return
        self._state = found
        self._places.sweep(found.version - self._settings.keep)
        for version in range(max(0, found.version - 1), found.version + 1):
            if version:
                self._learner.restore(
                    self._places.policy(version), sharedfs.read_bytes(self._places.optimizer(version))
                )
            self._past[version] = self._learner.snapshot()
        log.info("goes on from version %d", found.version)

    async def _cycle(self, client: AsyncRolloutClient, collector: Collector) -> None:
        """One update: rollouts in, a version out."""
        state, settings, began = self._state, self._settings, self._clock()
        record = Record(step=state.version + 1)
        groups = await self._collect(collector, record)
        record.rollout_s = self._clock() - began
        if settings.mode == "async" and record.step < settings.steps:
            wave = self._next_wave(settings.groups, record.step + 1, 0)
            state.seq = collector.seq
            await collector.submit(wave)
            state.ahead = wave
        else:
            state.ahead, state.seq = None, collector.seq
        learning = self._clock()
        await asyncio.to_thread(self._learn, groups, record)
        record.train_s = self._clock() - learning
        state.version = record.step
        state.records.append(record)
        pushing = self._clock()
        await asyncio.to_thread(self._save_version)
        elapsed_s = self._state.records[-2].elapsed_s
        record.elapsed_s = elapsed_s + self._clock() - began
        await asyncio.to_thread(self._save)
        await asyncio.to_thread(self._places.drop, state.version - settings.keep)
        await self._push(client)
        record.push_s = self._clock() - pushing
        record.elapsed_s = elapsed_s + self._clock() - began
        record.tokens_per_s = record.tokens / (self._clock() - began)
        log.info(
            "step %d: reward %.3f, %d of %d groups, length %.1f, gap %.1e, lag %.2f, entropy %.3f, %.1f+%.1f+%.1f s",
            record.step, record.reward, record.groups_kept,
            record.groups_asked, record.length, record.gap_max, record.lag_mean, record.entropy, record.rollout_s,
            record.train_s, record.push_s,
        )  # fmt: skip

    def _next_wave(self, missing: int, update: int, number: int) -> Wave:
        """The next tasks of the data set, as many as the router takes at once; moves on in it."""
        is_dapo = self._settings.algorithm == "dapo"
        count = wave_size(missing, self._state.rate) if is_dapo else missing
        count = max(1, min(count, self._plan.max_open // self._plan.group_size))
        wave = Wave(update, number, self._state.cursor, count)
        self._state.cursor += count
        return wave

    async def _collect(self, collector: Collector, record: Record) -> list[data.Group]:
        """The groups of an update; dapo asks again for those that turned out to teach nothing."""
        settings, state = self._settings, self._state
        wave = state.ahead or self._next_wave(settings.groups, record.step, 0)
        kept: list[data.Group] = []
        seen: list[data.Group] = []
        while True:
            found = await collector.closed(await collector.submit(wave))
            seen += found
            usable = [group for group in found if len(group.rollouts) > 1]
            spread = [group for group in usable if group.has_spread]
            if wave.number == 0:  # one step of the mean an update, of tasks that nothing has picked
                state.rate += _SMOOTHING * (len(spread) / len(found) - state.rate)
            kept += spread if settings.algorithm == "dapo" else usable
            record.groups_flat += len(usable) - len(spread)
            record.groups_short += len(found) - len(usable)
            missing = settings.groups - len(kept)
            if settings.algorithm == "grpo" or missing <= 0 or wave.number + 1 >= settings.waves:
                break
            wave = self._next_wave(missing, record.step, wave.number + 1)
        rollouts = [rollout for group in seen for rollout in group.rollouts]
        record.groups_asked, record.groups_kept = len(seen), len(kept)
        record.groups = [group.group_id for group in kept]
        record.reward = data.mean([rollout.reward for rollout in rollouts])
        record.length = data.mean([float(rollout.length) for rollout in rollouts])
        record.tokens = sum(rollout.length for rollout in rollouts)
        record.masked = sum(group.masked for group in seen)
        return kept

    def _learn(self, groups: Sequence[data.Group], record: Record) -> None:
        """Optimizer steps on the groups; in a thread, since it is all computing."""
        settings, version = self._settings, self._state.version
        dapo = settings.algorithm == "dapo"
        samples = data.with_gains(
            groups,
            data.Shaping(
                settings.overlong if dapo else None, settings.overlong_tail, settings.rewards == "permuted",
                self._plan.seed,
            ),
        )  # fmt: skip
        again, count = data.reencoded(samples, self._chat.decode, self._chat.encode)
        record.samples, record.reencoded, record.broken = count.samples, count.changed, count.broken
        if settings.tokens == "reencoded":
            samples = again
        if not samples:
            return
        lags = data.lags(samples, version)
        record.lag_mean, record.lag_max = data.mean([float(lag) for lag in lags]), max(lags)
        started = self._learner.logprobs(samples)
        self._gaps(samples, started, record)
        firsts = self._learner.first_logprobs(samples) if settings.kl else [[] for _ in samples]
        prepared = [
            Prepared(
                sample,
                [
                    recorded if drawn >= version else now
                    for recorded, drawn, now in zip(sample.recorded, sample.versions, nows, strict=True)
                ],
                first,
            )
            for sample, nows, first in zip(samples, started, firsts, strict=True)
        ]
        draw = random.Random(f"{self._plan.seed} {record.step}")  # noqa: S311 (is to be repeatable)
        stats = Stats()
        whole: dict[str, list[Prepared]] = {}
        for one in prepared:
            whole.setdefault(one.sample.rollout, []).append(one)
        rollouts = list(whole.values())
        size = math.ceil(len(rollouts) / settings.minibatches)
        for _ in range(settings.epochs):
            draw.shuffle(rollouts)
            for start in range(0, len(rollouts), size):
                self._learner.update([one for chains in rollouts[start : start + size] for one in chains], stats)
        tokens = max(1, stats.tokens)
        record.clip_share, record.entropy = stats.clipped / tokens, stats.entropy / tokens
        record.weight, record.kl, record.grad_norm = stats.weight / tokens, stats.kl / tokens, stats.grad_norm

    def _gaps(self, samples: Sequence[data.Sample], started: Sequence[Sequence[float]], record: Record) -> None:
        """Compare the engine's log-probs with ours, each token under the version that drew it."""
        version = self._state.version
        gaps: list[float] = []
        for drawn in sorted({one for sample in samples for one in sample.versions}):
            if drawn not in self._past:
                continue
            which = [index for index, sample in enumerate(samples) if drawn in sample.versions]
            ours = started
            if drawn != version:
                found = self._learner.logprobs([samples[index] for index in which], self._past[drawn])
                ours = [[] for _ in samples]
                for index, values in zip(which, found, strict=True):
                    ours[index] = values
            for index in which:
                sample = samples[index]
                gaps += [
                    abs(own - recorded)
                    for own, recorded, by in zip(ours[index], sample.recorded, sample.versions, strict=True)
                    if by == drawn
                ]
        record.gap_max, record.gap_mean, record.gap_tokens = max(gaps, default=0.0), data.mean(gaps), len(gaps)

    def _save_version(self) -> None:
        version = self._state.version
        self._past = {old: weights for old, weights in self._past.items() if old >= version - 1}
        self._past[version] = self._learner.snapshot()
        sharedfs.make_dirs(self._places.policy(version))
        for name, content in self._learner.policy_files().items():
            sharedfs.write_atomic(self._places.policy(version) / name, content)
        sharedfs.write_atomic(self._places.optimizer(version), self._learner.optimizer_bytes())

    def _save(self) -> None:
        """Make the newest record count, and write the table."""
        write_state(self._places, self._state)
        sharedfs.write_atomic(self._places.table, table_text(self._state.records).encode())

    async def _push(self, client: AsyncRolloutClient) -> None:
        """Bring the state's version onto the fleet, where it is not there yet."""
        version = self._state.version
        if not version or (await client.policy())["version"] >= version:
            return
        try:
            await client.policy(version, weights_path=str(self._places.policy(version).absolute()), mode="keep")
        except ServiceError as error:
            # A router that died in the middle has a successor that finishes the push: repeated, it is not newer.
            if error.code != "not_newer" or (await client.policy())["version"] != version:
                raise

    async def _measure_if_due(self, client: AsyncRolloutClient) -> None:
        """Solve held-out problems with the newest version: all of them first and last, some now and then between."""
        settings, record = self._settings.heldout, self._state.records[-1]
        is_end = record.step == 0 or self._is_over
        is_due = is_end or (settings.every and record.step % settings.every == 0)
        tasks = self._heldout[: settings.problems if is_end else settings.probe] if is_due else []
        if not tasks or record.heldout_asked == len(tasks):
            return
        began = self._clock()
        rows = await evaluate(
            client, tasks, k=1, tag=HELDOUT_TAG, priority=HELDOUT_PRIORITY, sampling=self._plan.sampling,
            key=f"heldout-{self._plan.run_id}-{record.step}-{len(tasks)}", max_open=self._plan.max_open,
        )  # fmt: skip
        rewards = [row["reward"] for row in rows if not row["mask_sample"] and row["reward"] is not None]
        record.heldout_asked = len(tasks)
        if rewards:
            record.heldout, record.heldout_problems = data.mean(rewards), len(rewards)
            record.heldout_low, record.heldout_high = wilson(record.heldout, len(rewards))
        spent_s = self._clock() - began
        record.heldout_s += spent_s
        record.elapsed_s += spent_s
        await asyncio.to_thread(self._save)
        if rewards:
            log.info(
                "step %d: held out %.3f of %d problems, %.1f s", record.step, record.heldout, len(rewards), spent_s
            )
        else:
            log.warning(
                "step %d: nothing could be measured: none of %d held-out rollouts counts", record.step, len(tasks)
            )
