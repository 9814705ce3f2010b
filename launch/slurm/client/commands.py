"""The Slurm client over Slurm's own commands: what every login node has, whatever its version.

Where a job is looked for, in order: squeue (one query, and the controller sends one user's jobs alone), sacct for what
it does not know, scontrol where there is no accounting or no squeue. A job that none of them knows is not in the
answer, and the caller goes on with the run's own files.
"""

from __future__ import annotations

import os
import pwd
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from launch.slurm.client import fields, json_shapes, sacct, scontrol, squeue
from launch.slurm.client.errors import SlurmError, SlurmRefused, SlurmUnavailable
from launch.slurm.client.protocol import FairShare, JobInfo, JobUsage, Partition, SiteInfo
from launch.slurm.client.runner import CommandRunner, Output, Runner

SCONTROL_JOBS: Final = 8
"""Jobs that scontrol is asked for one by one; more would be a flood of calls where batched queries have failed."""

# Words by which Slurm's commands say that nobody answered, as opposed to an answer that is no.
_NOBODY = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "connection timed out",
    "communication connection failure", "zero bytes were transmitted", "problem talking to the database",
    "failed to open persistent connection", "could not establish a configuration source", "authentication",
    "unable to resolve", "munge", "slurm backup controller in standby", "unable to establish", "plugin initialization",
    "database connection", "can't find an address", "no address for", "cannot contact",
)  # fmt: skip
_NOT_KNOWN = ("invalid job id", "job/step already completing or completed", "no jobs in the system", "not found")
_NO_ACCOUNTS = ("accounting storage is disabled", "not running a database", "accounting is disabled", "slurmdbd to run")


def current_user() -> str:
    """Name of who runs this, or the number of one without a name (as in some containers)."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class CommandClient:
    """See SlurmClient, whose methods these are."""

    def __init__(self, clusters: Sequence[str] = (), runner: Runner | None = None) -> None:
        self._clusters = tuple(clusters)
        self._runner = runner if runner is not None else CommandRunner()
        self._accounts = True

    @property
    def calls(self) -> Counter[str]:
        """Commands run so far, by name."""
        return self._runner.calls

    async def jobs(
        self, ids: Sequence[str] = (), *, name: str | None = None, user: str | None = None, since: float | None = None
    ) -> list[JobInfo]:
        """See SlurmClient.jobs; raises SlurmUnavailable when no source could be asked."""
        wanted = list(dict.fromkeys(fields.job_ids(one)[0] for one in ids))
        if not wanted and name is None:
            return []
        failure: SlurmError | None = None
        found: list[JobInfo] = []
        try:
            found = await self._queue(wanted, name, current_user() if user is None else user)
        except SlurmError as error:
            failure = error
        missing = _missing(wanted, found)
        if missing:
            older, asked = await self._older(missing, since, failure)
            found += older
            if failure is not None and not asked:
                raise failure
        elif failure is not None:
            raise failure
        return found

    async def _queue(self, ids: Sequence[str], name: str | None, user: str) -> list[JobInfo]:
        out = await self._ask(squeue.arguments(ids, name, user, self._clusters, json=False), empty=_NOT_KNOWN)
        try:
            return squeue.parse(out)
        except ValueError:
            # A version without one of the columns, or a comment with a line break in it.
            out = await self._ask(squeue.arguments(ids, name, user, self._clusters, json=True), empty=_NOT_KNOWN)
            return json_shapes.parse(out, ids=ids, name=name, user="" if user.isdigit() else user) if out else []

    async def _older(
        self, ids: Sequence[str], since: float | None, failure: SlurmError | None
    ) -> tuple[list[JobInfo], bool]:
        """What sacct, else scontrol, says of these jobs, and whether either could be asked; `failure` is squeue's."""
        found: list[JobInfo] = []
        if self._accounts:
            try:
                found = sacct.parse_jobs(await self._ask(sacct.arguments(ids, since, self._clusters)))
                if failure is not None:
                    found = [sacct.uncertain(job) for job in found]
                return found, True
            except SlurmRefused as error:
                self._accounts = not _says(error.said, _NO_ACCOUNTS)
            except SlurmUnavailable:
                pass
        asked = False
        if isinstance(failure, SlurmUnavailable) and not failure.no_command:
            return found, asked  # scontrol would wait for the same controller
        for one in ids[:SCONTROL_JOBS]:
            for at in self._clusters or ("",):
                argv = ["scontrol", *([f"--clusters={at}"] if at else []), "--oneliner", "show", "job", one]
                try:
                    jobs = scontrol.parse_jobs(await self._ask(argv, empty=_NOT_KNOWN))
                except SlurmError:
                    return found, asked
                found += [msgspec.structs.replace(job, cluster=at) for job in jobs]
                asked = True
        return found, asked

    async def cancel(self, ids: Sequence[str], *, pending_only: bool = False) -> None:
        """See SlurmClient.cancel."""
        if ids:
            pending = ["--state=PENDING"] if pending_only else []
            await self._ask(["scancel", *self._where(), *pending, *ids], empty=_NOT_KNOWN, changes=True)

    async def signal(self, job_id: str, name: str, *, batch_only: bool = False) -> None:
        """See SlurmClient.signal."""
        batch = ["--batch"] if batch_only else []
        await self._ask(["scancel", *self._where(), f"--signal={name}", *batch, job_id], changes=True)

    async def requeue(self, job_id: str) -> None:
        """See SlurmClient.requeue; scontrol takes one cluster, so of several the one that knows the job is meant."""
        refused: SlurmError | None = None
        for at in self._clusters or ("",):
            argv = ["scontrol", *([f"--clusters={at}"] if at else []), "requeue", job_id]
            try:
                await self._ask(argv, changes=True)
                return
            except SlurmRefused as error:
                refused = error
        if refused is not None:
            raise refused

    async def site(self) -> SiteInfo:
        """See SlurmClient.site; of several clusters the first."""
        where = [f"--clusters={self._clusters[0]}"] if self._clusters else []
        config = await self._ask(["scontrol", *where, "show", "config"])
        partitions = await self._ask(["scontrol", *where, "--oneliner", "--all", "show", "partition"])
        nodes = await self._ask(["sinfo", *where, "--noheader", "--all", "--Node", f"--format={scontrol.NODE_COLUMNS}"])
        return scontrol.site(config, partitions, nodes)

    async def partitions(self) -> tuple[Partition, ...]:
        """See SlurmClient.partitions; of several clusters those of the first."""
        where = [f"--clusters={self._clusters[0]}"] if self._clusters else []
        said = await self._ask(["scontrol", *where, "--oneliner", "--all", "show", "partition"])
        return scontrol.parse_partitions(said, ())

    async def fair_share(self, user: str, account: str | None = None) -> FairShare | None:
        """See SlurmClient.fair_share; of several accounts and none named, the one with the best factor."""
        which = [f"--accounts={account}"] if account else []
        columns = "Account,User,NormShares,EffectvUsage,FairShare"
        where = [f"--clusters={self._clusters[0]}"] if self._clusters else []
        argv = ["sshare", *where, "--noheader", "--parsable2", f"--users={user}", *which, f"--format={columns}"]
        try:
            out = await self._ask(argv)
        except SlurmRefused:
            return None
        return parse_shares(out, user)

    async def accounting(self, ids: Sequence[str], since: float) -> list[JobUsage] | None:
        """See SlurmClient.accounting."""
        if not ids:
            return []
        try:
            return sacct.parse_usage(await self._ask(sacct.arguments(ids, since, self._clusters, usage=True)))
        except SlurmRefused as error:
            if _says(error.said, _NO_ACCOUNTS):
                return None
            raise

    def _where(self) -> list[str]:
        return [f"--clusters={','.join(self._clusters)}"] if self._clusters else []

    async def _ask(self, argv: Sequence[str], *, empty: Iterable[str] = (), changes: bool = False) -> str:
        """The command's output; "" where it complains in one of the words that mean "nothing is there"."""
        output = await self._runner.run(argv, changes=changes)
        if output.code == 0:
            return output.out
        if output.code < 0:
            raise SlurmUnavailable(
                f"{argv[0]} was ended by signal {-output.code} before it said what it did",
                command=" ".join(argv), may_have_happened=changes,
            )  # fmt: skip
        if _says(output.err, _NOBODY):
            raise SlurmUnavailable(
                f"{argv[0]}: Slurm does not answer: {output.said}; see `scontrol ping`",
                command=" ".join(argv), may_have_happened=changes,
            )  # fmt: skip
        if _says(output.err, empty):
            return output.out
        raise _refusal(argv, output)


def _refusal(argv: Sequence[str], output: Output) -> SlurmRefused:
    return SlurmRefused(f"{argv[0]}: {output.said}", command=" ".join(argv), said=output.said)


def _says(text: str, words: Iterable[str]) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in words)


def _missing(ids: Sequence[str], found: Sequence[JobInfo]) -> list[str]:
    known = {job.leader_id for job in found}
    return [one for one in ids if one not in known]


def parse_shares(out: str, user: str) -> FairShare | None:
    """What sshare says: a user's line follows the line of its account, which holds the account's part of the whole."""
    best: FairShare | None = None
    share = usage = None
    for line in out.splitlines():
        account, who, shares, used, factor, *_ = [*line.split("|"), "", "", "", "", ""]
        if not who:
            share, usage = _real(shares), _real(used)
        elif who == user:
            one = FairShare(user=user, account=account.strip(), factor=_real(factor), share=share, usage=usage)
            if best is None or (one.factor or 0.0) > (best.factor or 0.0):
                best = one
    return best


def _real(said: str) -> float | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
