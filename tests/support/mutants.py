"""Seeded mutants: for each parity test the mending switched off, and the check that the test then fails.

A mutant is applied in a copy of the packages and tests, whose own modules alone are imported there. One whose old text
is gone, or whose test still passes, is a failure.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COPIED = ("conf", "sandbox", "stages", "workflows", "launch", "tests")
LEDGER = "tests/unit/ledger/test_parity_ledger.py"
WORKERS = "tests/integration/test_parity_workers.py"
SANDBOXES = "tests/integration/test_parity_sandboxes.py"
READING = "tests/unit/stages_files/test_parity_reading.py"
KILL = "tests/unit/stages_files/test_parity_kill.py"
STUCK = "tests/unit/launch/test_parity_stuck.py"
FLEET = "tests/unit/router/test_parity_fleet.py"
NODE = "tests/unit/sandbox/test_nodecache.py"
PRUNE = "tests/unit/images/test_prune.py"
ISOLATION = "tests/integration/sandbox/test_parity_isolation.py"
LEFTOVERS = "tests/integration/sandbox/test_parity_leftovers.py"
SLURM = "tests/unit/launch/slurm/test_parity_slurm.py"
ANSWERS = "tests/unit/launch/slurm/test_parity_answers.py"
ENGINES = "tests/unit/model/test_parity_engines.py"
TRAIN = "tests/unit/workflows_train/test_loop.py"
GATEWAY = "tests/unit/stages_gateway/test_chains.py"
STREAMS = "tests/unit/stages_gateway/test_streams.py"
HTTP = "tests/unit/stages_http/test_http_client.py"
PLAIN = "tests/unit/sandbox/test_directory.py"


class MutantError(AssertionError):
    """A mutant does not apply any more, or its test does not notice it."""


@dataclass(frozen=True)
class Mutant:
    """One mending switched off: `old` becomes `new` in `file`, and the tests that `select` names must fail.

    Without a file nothing is changed, and they must pass.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str


BOOK, CLOSING, COMMITS = "stages/ledger/book.py", "stages/ledger/closing.py", "stages/ledger/commits.py"
MACHINE, LAG = "stages/ledger/machine.py", "stages/ledger/lag.py"
ASSIGNED = "stages/ledger/fleet.py"
GRANTS, WORKER = "stages/ledger/grants.py", "stages/worker.py"

MUTANTS = (
    Mutant(
        "http_what_may_have_been_done_is_asked_again", "stages/http_client.py",
        " and method in _REPEATED:", ":", HTTP, "changes_nothing",
    ),
    Mutant(
        "plain_a_change_that_hides_its_time_is_not_packed", "sandbox/smalllayers.py",
        "of.st_mtime_ns, of.st_ctime_ns)", "of.st_mtime_ns)", PLAIN, "hides_its_time",
    ),
    Mutant(
        "gateway_histories_are_encoded_again", "stages/gateway/capture.py",
        "        if best is not None and mark is not None:\n",
        "        if best is not None and mark is None:\n",
        GATEWAY, "sampled_ids_that_no_encoding_gives",
    ),
    Mutant(
        "gateway_changed_replies_count_as_sampled", "stages/gateway/capture.py",
        "    if known.content.strip() != said.content.strip():\n",
        "    if known.content.strip() == said:\n",
        GATEWAY, "reply_that_was_changed",
    ),
    Mutant(
        "gateway_a_bad_rollout_can_be_taken_back", "stages/gateway/session.py",
        "        except RecursionError as error:", "        except ZeroDivisionError as error:",
        GATEWAY, "too_deep_or_out_of_vocabulary",
    ),
    Mutant(
        "gateway_streams_show_what_may_still_change", "stages/gateway/live.py",
        "end = min(end, found, _start_of(mark, self._pending))", "end = min(end, found)",
        STREAMS, "may_become_something_else",
    ),
    Mutant(
        "gateway_what_was_shown_is_sampled_anew", "stages/hearing.py",
        "        if self._listener.retract(count):\n", "        if self._listener.retract(count) or count:\n",
        STREAMS, "nobody_was_shown",
    ),
    Mutant(
        "b01_a_fault_ends_the_worker", WORKER,
        "        except Exception as error:  # a rollout's fault is data",
        "        except ZeroDivisionError as error:  # a rollout's fault is data",
        WORKERS, "b01 and eval",
    ),
    Mutant(
        "b16_a_drip_has_all_the_time", "stages/engine_client.py",
        "content=body, headers=self._headers, timeout=timeout_s\n", "content=body, headers=self._headers\n",
        ENGINES, "b16_a_slow_drip",
    ),
    Mutant(
        "b16_nobody_is_left_alone", "stages/model.py",
        "pause_s = max(wait_s, asked_away_s)", "pause_s = wait_s", ENGINES, "b16_who_asks",
    ),
    Mutant(
        "b29_prompts_are_encoded_again", "stages/model.py",
        "            url, stream.ids, bounded,",
        "            url, self._chat.encode(self._chat.decode(stream.ids)), bounded,",
        ENGINES, "b29",
    ),
    Mutant(
        "grading_harbor_canaries_pass", "workflows/tasks/harbor/canaries.py",
        "orelse=[], finalbody=fail)", "orelse=[], finalbody=[ast.Pass()])",
        "tests/unit/workflows/test_harbor.py", "canaries_run",
    ),
    Mutant(
        "grading_harbor_trusts_every_row", "workflows/tasks/harbor/directory.py",
        'return "trusted" if trusted else "untrusted"', 'return "trusted"',
        "tests/unit/workflows/test_harbor.py", "only_data",
    ),
    Mutant(
        "grading_expected_outputs_are_public", "workflows/tasks/programs.py",
        'PRIVATE: Final = frozenset({"inputs", "outputs", ', 'PRIVATE: Final = frozenset({"inputs", ',
        "tests/integration/grading/test_programs.py", "tests_are_private",
    ),
    Mutant(
        "b02_init_runs_ahead", GRANTS, "        if room <= 0:\n            break\n", "", LEDGER, "b02",
    ),
    Mutant(
        "b02_the_buffer_has_no_bound", BOOK,
        "room = self.state.rules.ready_buffer - len(self.queues.by_stage[RUN])", "room = 1 << 30", LEDGER, "b02",
    ),
    Mutant(
        "b03_a_drain_counts_as_a_fault", WORKER,
        "return Result(outcome=GIVEN_BACK", 'return Result(outcome="infrastructure"', WORKERS, "b03",
    ),
    Mutant(
        "b04_final_faults_are_retried", COMMITS,
        "return OUTCOMES[item.outcome].retried and not item.final", "return OUTCOMES[item.outcome].retried",
        LEDGER, "b04",
    ),
    Mutant(
        "b04_final_does_not_reach_the_router", WORKER, "                final=result.final,\n", "", SANDBOXES, "b04",
    ),
    Mutant(
        "b04_a_400_is_no_last_word", "stages/engine_client.py",
        'refused the request with {status}: {message}", final=True)',
        'refused the request with {status}: {message}")',
        SANDBOXES, "b04",
    ),
    Mutant(
        "b05_superseded_segments_are_deleted", COMMITS,
        "        book.state.superseded[item.segment.path] = None\n", "        pass\n", WORKERS, "b05",
    ),
    Mutant(
        "b06_late_results_are_taken_from_anybody", COMMITS,
        "if lease is None or lease.member != event.member:", "if lease is None:", LEDGER, "b06",
    ),
    Mutant(
        "b06_a_late_result_is_not_logged", WORKER, 'if result.status == "superseded":', "if False:", WORKERS, "b06",
    ),
    Mutant(
        "b07_a_dead_replica_stays_dead", "launch/supervisor.py",
        '            self._say(f"{kind}-{number} ended with {_ending(code)}; started again")\n', "            return\n",
        SLURM, "b07_a_replica_that_dies",
    ),
    Mutant(
        "b07_a_component_that_cannot_live_ends_quietly", "launch/slurm/step.py",
        "            keeping.result()\n", "", SLURM, "b07_a_replica_that_cannot",
    ),
    Mutant(
        "b07_the_driver_is_not_told", "launch/slurm/leader.py",
        "        if gone is not None and not self._continuing.is_added:\n            self._tell_driver(gone)\n", "",
        SLURM, "b07_a_component",
    ),
    Mutant(
        "b07_sessions_stay_with_the_dead", "stages/ledger/fleet.py",
        "replica is not None and replica.health != DOWN", "replica is not None", SLURM, "b07_sessions",
    ),
    Mutant(
        "b08_added_jobs_are_forgotten", "launch/slurm/cancelling.py",
        "submissions = await asyncio.to_thread(record.read, layout)",
        'submissions = [one for one in await asyncio.to_thread(record.read, layout) if one.reason != "scale"]',
        SLURM, "b08_every_job",
    ),
    Mutant(
        "b08_jobs_of_a_cancelled_run_that_run_stay", "launch/slurm/continuing.py",
        "pending_only=not cancelled", "pending_only=True", SLURM, "b08_a_cancelled",
    ),
    Mutant(
        "b08_a_step_outlives_its_leader", "launch/slurm/step.py", "        words[STOP]()\n", "", SLURM, "b08_a_step",
    ),
    Mutant(
        "b08_a_revoked_rollout_works_on", WORKER, "                    task.cancel()\n", "", SANDBOXES, "b08",
    ),
    Mutant(
        "b07_a_hung_replica_is_waited_for", "stages/pools/sessions.py",
        "            timeout.reschedule(0.0)\n", "            pass\n", FLEET, "b07",
    ),
    Mutant(
        "b09_the_first_replica_gets_all", ASSIGNED,
        "entry = (replica.load, replica.chosen,", "entry = (0.0, 0,", FLEET, "b09",
    ),
    Mutant(
        "b10_a_prefix_is_the_name", ASSIGNED,
        "session = self.sessions.pop(rollout_id, None)",
        'session = self.sessions.pop(next((r for r in reversed(self.sessions) if r.startswith(rollout_id)), ""), None)',
        FLEET, "b10",
    ),
    Mutant(
        "b11_full_replicas_are_not_avoided", ASSIGNED,
        "                if replica_id not in avoid:\n", "                if replica_id:\n", FLEET, "b11",
    ),
    Mutant(
        "b11_old_sessions_stay", ASSIGNED, "        return moving\n", "        return []\n", FLEET, "b11",
    ),
    Mutant(
        "b12_aborted_sessions_wait", "stages/router/replicas.py",
        'self.policy.syncing.get(session.replica) == "abort"', "False", FLEET, "b12 and abort",
    ),
    Mutant(
        "b12_rolling_is_all_at_once", "stages/router/policy.py",
        'asyncio.Semaphore(1 if self._sync == "rolling" else', "asyncio.Semaphore(9 if self._sync else", FLEET, "b12",
    ),
    Mutant(
        "b14_only_the_router_tells_its_lag", "stages/router/metrics.py",
        "*_workers(loads or {})", "*_workers({})", FLEET, "b14",
    ),
    Mutant(
        "b15_the_limit_stays_as_it_is", "launch/bodies.py", "    open_files.ensure()\n", "", FLEET, "b15",
    ),
    Mutant(
        "b37_a_joiner_gets_all", ASSIGNED,
        "entry = (replica.load, replica.chosen,", "entry = (0.0, -ord(replica.id[-1]),", FLEET, "b37",
    ),
    Mutant(
        "b13_each_rollout_for_itself", LAG,
        "    for rollout in _open(book, group):\n", '    for rollout in [book.state.rollouts[whose]]:\n',
        LEDGER, "b13",
    ),
    Mutant(
        "b13_the_newest_version_decides", LAG, "current = min(known),", "current = max(known),", LEDGER, "b13",
    ),
    Mutant(
        "b13_a_newer_policy_drops_nothing", MACHINE, "        lag.drop_all_stale(self)\n", "", LEDGER, "b13",
    ),
    Mutant(
        "b13_the_newest_span_decides", "stages/pools/run.py",
        "return min(versions, default=None)", "return max(versions, default=None)", WORKERS, "b13",
    ),
    Mutant(
        "b17_sandboxes_share_a_directory", "sandbox/pty_backend.py",
        'f"s{self._made}"', '"s1"', ISOLATION, "b17 and bubblewrap",
    ),
    Mutant(
        "b17_a_change_that_keeps_size_and_times_is_lost", "sandbox/pristine.py",
        "status.st_ino and status.st_ctime_ns < self._before", "status.st_ino",
        "tests/unit/sandbox/test_pristine.py", "size_and_times",
    ),
    Mutant(
        "b17_attempts_share_a_network", "sandbox/mountplan.py", '"--unshare-net", ', "",
        ISOLATION, "b17 and bubblewrap",
    ),
    Mutant(
        "b17_an_unpacked_image_in_use_leaves", "sandbox/nodecache.py",
        "        if lock is None:\n            return False\n",
        "        lock = os.open(file, os.O_RDWR) if lock is None else lock\n", NODE, "in_use_never_leaves",
    ),
    Mutant(
        "b17_a_layer_under_a_run_is_pruned", "stages/pruning.py",
        "    since = min((use.since for use in using), default=now) - GRACE_S\n", "    since = now\n",
        PRUNE, "may_use_goes",
    ),
    Mutant(
        "b18_a_helper_holds_the_workers_output", "sandbox/spawn_client.py",
        "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,", "stdin=subprocess.DEVNULL,",
        ISOLATION, "b18 and bubblewrap",
    ),
    Mutant(
        "b19_a_failure_goes_on", "launch/slurm/leader.py", "if (told or bool(broken)) and await", "if await",
        SLURM, "b19_the_drivers",
    ),
    Mutant(
        "b19_the_first_error_is_not_quoted", "launch/slurm/follow.py", 'summary.get("error") or ', "",
        SLURM, "b19_the_command_line",
    ),
    Mutant(
        "b20_accounting_begins_at_midnight", "launch/slurm/client/sacct.py", 'f"--starttime={begin}", ', "",
        ANSWERS, "b20_a_job",
    ),
    Mutant(
        "b20_a_forgotten_job_runs_for_ever", "launch/slurm/watch.py",
        "seen.asked_at is not None and self._gone(control):", "False:", ANSWERS, "b20_without",
    ),
    Mutant(
        "b21_every_look_is_a_question", "launch/slurm/watch.py",
        "        return now >= self.next_at\n", "        return True\n", ANSWERS, "b21_an_hour",
    ),
    Mutant(
        "b21_a_beat_is_not_enough", "launch/slurm/watch.py", "hearing=await self._hears()", "hearing=False",
        ANSWERS, "b21_an_hour",
    ),
    Mutant(
        "b22_a_time_limit_is_an_end_like_any", "launch/slurm/client/states.py",
        '"TIMEOUT": JobState.TIMEOUT,', '"TIMEOUT": JobState.COMPLETED,', ANSWERS, "b22_no_end",
    ),
    Mutant(
        "b22_an_unknown_state_is_an_end", "launch/slurm/client/states.py",
        "_SHORT.get(name, name), JobState.UNKNOWN)", "_SHORT.get(name, name), JobState.COMPLETED)",
        ANSWERS, "b22_what_nobody",
    ),
    Mutant(
        "b23_each_start_is_a_job", "launch/slurm/client/states.py",
        "sum(state.may_return for state in attempts[:-1])", "0", ANSWERS, "b23_accountings",
    ),
    Mutant(
        "b23_a_preempted_job_starts_anew", "launch/slurm/client/verdict.py",
        "again = left or head.restarts > 0 or", "again = False and", ANSWERS, "b23_status",
    ),
    Mutant(
        "b24_any_token_will_do", "stages/router/auth.py",
        "            if hmac.compare_digest(given, expected):\n", "            if True:\n", SLURM, "b24_nobody",
    ),
    Mutant(
        "b25_commands_ask_the_default_cluster", "launch/slurm/client/commands.py",
        """return [f"--clusters={','.join(self._clusters)}"] if self._clusters else []""", "return []",
        ANSWERS, "b25_clusters_reach",
    ),
    Mutant(
        "b25_scripts_go_to_the_default_cluster", "launch/slurm/render.py",
        '"clusters": ",".join(cluster.clusters) or None', '"clusters": None', ANSWERS, "b25_clusters_are",
    ),
    Mutant(
        "b26_any_option_is_free", "launch/slurm/checks.py", "        elif name in OWN_OPTIONS:\n",
        "        elif not name:\n", ANSWERS, "b26_an_array",
    ),
    Mutant(
        "b26_components_may_share_nodes", "launch/slurm/fitting.py", "            if have < asked:\n",
        "            if have < 0:\n", ANSWERS, "b26_het_partitions",
    ),
    Mutant(
        "b27_no_job_is_held_back", "launch/slurm/submit.py", '"fallback", options=[later])', '"fallback")',
        SLURM, "b27_auto_leaves",
    ),
    Mutant(
        "b27_both_placements_stay", "launch/slurm/continuing.py",
        "            await self._cancel(rivals, pending_only=True)\n", "", SLURM, "b27_auto",
    ),
    Mutant(
        "b28_a_wrong_crc_passes", "stages/ranges.py", "    if actual != crc32:\n", "    if False:\n",
        KILL, "b28_a_range",
    ),
    Mutant(
        "b30_a_newer_schema_is_read_all_the_same", "stages/shards/mapped.py",
        "            check_version(self.path, schema)\n", "", READING, "b30_a_reader",
    ),
    Mutant(
        "b30_a_newer_index_is_read_all_the_same", "stages/shards/index.py",
        "        if version > INDEX_VERSION:\n", "        if not version:\n", READING, "b30_the_index",
    ),
    Mutant(
        "b31_one_shell_of_a_worker_at_a_time", "sandbox/terminal.py",
        "        self.lock = asyncio.Lock()  #", '        self.lock = globals().setdefault("_ONE", asyncio.Lock())  #',
        ISOLATION, "b31 and none",
    ),
    Mutant(
        "b32_retries_outlive_the_deadline", MACHINE,
        "            if group.deadline is not None and group.deadline <= state.now:\n",
        "            if group.deadline is not None and group.deadline <= state.now and not state.delayed:\n",
        LEDGER, "b32",
    ),
    Mutant(
        "b33_a_sandbox_death_scores_zero", "stages/ledger/outcomes.py",
        '    "sandbox": _RETRIED_FAULT,\n', '    "sandbox": _TRAINABLE_ZERO,\n', LEDGER, "b33",
    ),
    Mutant(
        "b33_a_sandbox_death_is_the_agents_doing", "stages/pools/run.py",
        "except (StageError, SandboxError, OSError):", "except (StageError, OSError):", SANDBOXES, "b33",
    ),
    Mutant(
        "b34_a_kernel_is_taken_from_where_others_may_write", "sandbox/kernel/layer.py",
        " and not found.st_mode & 0o022", "", "tests/unit/sandbox/test_kernel_parts.py", "only_whole",
    ),
    Mutant(
        "b34_sockets_of_the_host_are_there", "sandbox/mountplan.py", '"--unshare-net", ', "",
        ISOLATION, "b34 and bubblewrap",
    ),
    Mutant(
        "b34_apptainer_keeps_the_hosts_sockets", "sandbox/apptainer_plan.py", '"--net", "--network", "none", ', "",
        ISOLATION, "b34 and apptainer",
    ),
    Mutant(
        "b35_the_network_is_the_hosts", "sandbox/mountplan.py", '"--unshare-net", ', "",
        ISOLATION, "b35 and bubblewrap",
    ),
    Mutant(
        "b35_apptainer_keeps_the_hosts_network", "sandbox/apptainer_plan.py", '"--net", "--network", "none", ', "",
        ISOLATION, "b35 and apptainer",
    ),
    Mutant(
        "b36_what_outlives_its_spawner_stays", "sandbox/scratch.py",
        "            end_carriers((path / OWNER).read_text())\n", "            (path / OWNER).read_text()\n", LEFTOVERS,
        "b36 and none",
    ),
    Mutant(
        "b38_masked_rollouts_are_usable", CLOSING,
        "    if rule.in_statistics:\n        group.usable += 1\n", "    group.usable += 1\n", LEDGER, "b38",
    ),
    Mutant(
        "b38_masked_rollouts_have_a_reward", CLOSING,
        "    if reward is not None:\n        counts.reward_sum += reward\n",
        "    if True:\n        counts.reward_sum += reward or 0.0\n", LEDGER, "b38",
    ),
    Mutant(
        "b39_nobody_asks_what_is_stuck", "launch/drive.py",
        "and still_s > self._config.stuck_after_s:", "and still_s > 1e12:", STUCK, "b39_nothing",
    ),
    Mutant(
        "b40_a_straggler_is_waited_for", MACHINE,
        '                endings.cancel_open(self, group, "deadline", "the group\'s deadline passed")\n',
        "                pass\n", LEDGER, "b40",
    ),
    Mutant(
        "b40_a_closed_group_forgets_its_straggler", CLOSING, "        rollout_ids=group.rollouts,\n",
        "        rollout_ids=group.rollouts[: group.usable],\n", LEDGER, "b40",
    ),
    Mutant(
        "train_an_older_versions_token_counts_as_the_current_ones", "workflows/train/loop.py",
        "recorded if drawn >= version else now", "recorded",
        TRAIN, "checked_under_the_version",
    ),
    Mutant(
        "train_a_killed_trainer_asks_for_other_groups", "workflows/train/collecting.py",
        'idempotency_key=f"{self._key}-{wave.update}-{wave.number}"',
        'idempotency_key=f"{self._key}-{wave.update}-{wave.number}-{id(self)}"',
        TRAIN, "every_life_is_short",
    ),
)  # fmt: skip


UNCHANGED = Mutant(
    "unchanged", "", "", "", f"{LEDGER} {WORKERS} {SANDBOXES} {STUCK}", "test_parity_ledger or b05 or b33 or b39"
)
"""That tests can pass the way mutants are tried."""


def apply(mutant: Mutant, directory: Path) -> None:
    """Apply the mutant in the copy `directory`.

    Raises:
        MutantError: the old text is not there exactly once.
    """
    if not mutant.file:
        return
    target = directory / mutant.file
    text = target.read_text()
    if text.count(mutant.old) != 1:
        raise MutantError(f"{mutant.name}: its old text is {text.count(mutant.old)} times in {mutant.file}, not once")
    target.unlink()  # the copy is made of hard links: the original must not change
    target.write_text(text.replace(mutant.old, mutant.new))


def verdict(mutant: Mutant, code: int, output: str) -> str | None:
    """None where the mutant's tests ran and failed, by pytest's exit code and output; else what there was."""
    # 1 says that tests ran and failed; anything else that nothing was found out.
    last = output.splitlines()[-1] if output else ""
    failed = code == 1 and " failed" in last and " error" not in last
    if failed if mutant.file else code == 0:
        return None
    return f"{mutant.name}: exit code {code} of {mutant.tests}: {output[-2000:]}"


def arguments(mutant: Mutant) -> list[str]:
    """What pytest is told: the plugins that the tests need alone, for loading all takes longer than most tests."""
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
    most_s = 20 if mutant.file else 120  # a mutant may be noticed by the time alone; what is unchanged is to pass
    return ["-x", *plugins, f"--timeout={most_s}", "--rootdir", ".", "-k", mutant.select, *mutant.tests.split()]


def environment(directory: Path) -> dict[str, str]:
    """What pytest and its processes need to know to find the copy's modules."""
    return {"PYTHONPATH": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def copy(directory: Path) -> None:
    """The packages and the tests, as they are."""
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, directory / name, copy_function=_link)
    shutil.copy2(REPOSITORY / "pyproject.toml", directory)


def _link(source: str, target: str) -> None:
    """Hard links where the file systems allow: sources keep their times, so their compiled forms stay valid."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
