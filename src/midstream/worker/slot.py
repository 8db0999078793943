"""All tasks of one slot: deployed, wired, run in turns, cancelled; one attempt at a time.

    IDLE --Deploy--> DEPLOYING --state read, operators open--> DEPLOYED --Start--> RUNNING
      ^                                                                               |
      +--------------------------------- Cancel ---------------------------------------+

Messages and completions of an attempt that is not the current one are ignored.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias

import msgspec

from midstream.checkpoint.channel_state import ReadAhead, verify_channels
from midstream.checkpoint.extents import inline_bytes_max
from midstream.checkpoint.state_files import known_chunks, read_parts
from midstream.core.config import JobConfig
from midstream.core.elements import CheckpointBarrier
from midstream.core.errors import ClusterError, InvariantError, assert_never
from midstream.core.ids import ChannelId, TaskId
from midstream.core.keys import key_group_range
from midstream.core.seams import Clock, Done, Executor, Failed, Ids, Signal, Storage, Transport
from midstream.exchange.capacity import WINDOW_BUFFERS_MAX, WINDOW_BUFFERS_MIN
from midstream.exchange.channel import InputChannel, LocalChannel, RemoteChannel
from midstream.exchange.gate import Arrival, InputGate
from midstream.exchange.link import PeerLink
from midstream.exchange.partition import ResultPartition
from midstream.exchange.pool import BufferPool
from midstream.exchange.queue import QueueTime
from midstream.graph.job_graph import JobGraph
from midstream.graph.overtaking import overtakable
from midstream.protocol import messages as m
from midstream.protocol.live_rows import RowsShown, ShowRows
from midstream.state.parts import StatePart
from midstream.worker.commits import SlotCommits
from midstream.worker.failures import deploy_failed
from midstream.worker.finished import FinishedTask
from midstream.worker.recovery import GateRecovery
from midstream.worker.task import MAILS_IN_A_ROW_MAX, Task, TaskSeams

STEPS_PER_MAIL = 8
RUN_S = 0.001
"""Between two looks at the sockets there are at most so many steps, and no new one begins after so long."""

READ_AHEAD_OF_POOL = 4
"""Of recovered rows, this part of the pool's size is kept in memory, besides the pool, from when they are checked."""


class SlotState(Enum):
    IDLE = auto()
    DEPLOYING = auto()
    DEPLOYED = auto()
    RUNNING = auto()


_RUNNING = SlotState.RUNNING


_InFlight: TypeAlias = dict[TaskId, tuple[m.ChannelState, ...]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What is read and unpickled for one task before it is built."""

    graph: JobGraph
    parts: dict[str, dict[str, StatePart]]
    """By operator uid."""
    known: dict[str, m.ChunkHandle]
    """Which of their chunks are in files already."""
    watermarks: dict[str, tuple[int, int]]
    """See `Task.open`."""


class SlotMachine:
    """`send` goes to the coordinator, FIFO. `unpickle` turns `Deploy.graph` into a JobGraph."""

    def __init__(
        self,
        *,
        clock: Clock,
        executor: Executor,
        ids: Ids,
        transport: Transport,
        open_storage: Callable[[str], Storage],
        send: Callable[[m.FromSlot], None],
        make_signal: Callable[[], Signal],
        unpickle: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._clock = clock
        self._executor = executor
        self._ids = ids
        self._transport = transport
        self._open_storage = open_storage
        self._send = send
        self._unpickle = unpickle
        self._commits = SlotCommits(executor, open_storage, send, make_signal, unpickle)
        self.slot_id = -1
        self.state = SlotState.IDLE
        self.attempt = -1
        self._graph = b""
        """The pickled JobGraph, as it was sent last."""
        self.failure: BaseException | None = None
        """What the last deployment has failed with."""
        self._reset()

    def _reset(self) -> None:
        self.state = SlotState.IDLE
        self.tasks: dict[TaskId, Task] = {}
        """All that run; see `_finished`."""
        self._at_work: Task | None = None
        """The one whose step it is, or that is being opened."""
        self._finished: dict[TaskId, FinishedTask] = {}
        """Those of this slot that had finished in the checkpoint."""
        self.pool: BufferPool | None = None
        self._links: dict[int, PeerLink] = {}
        self._remote: dict[int, list[RemoteChannel]] = {}
        """Channels from each peer slot."""
        self._outgoing: list[tuple[int, ResultPartition, int]] = []
        """(peer slot, partition, index of the subpartition) for each consumer in another slot."""
        self._scheduled: set[Task] = set()
        self._ready: deque[Task] = deque()
        self._run_posted = False
        self._favoured = 0
        """How often in a row a task went first because it had mail."""

    # ---- messages --------------------------------------------------------------

    def handle(self, message: m.ToSlot) -> None:
        """One message of the coordinator, in the order sent. Never raises for what the job did wrong."""
        match message:
            case m.Deploy():
                self._deploy(message)
                return
            case m.Release():
                self.close()
                return
            case m.Welcome(slot=slot):
                self.slot_id = slot
                return
            case m.Heartbeat():
                return
            case m.Cancel(attempt):
                self._cancel(attempt)
                return
            case m.CommitSinks():
                self._commits.load(msgspec.structs.replace(message, graph=self._graph_of(message)))
                return
            case m.Commit():
                self._commits.commit(message)
                return
            case _:  # the others are for one attempt
                pass
        if message.attempt != self.attempt or self.state is SlotState.IDLE:
            return
        match message:
            case m.Start(_, peers):
                self._start(peers)
            case m.TriggerCheckpoint(_, checkpoint_id, created_ms, tasks, timeout_ms, holds, completed_id):
                barrier = CheckpointBarrier(checkpoint_id, created_ms, timeout_ms, completed_id)
                for ref in tasks:
                    self._task(ref).trigger_checkpoint(barrier, holds=holds)
            case m.CheckpointCompleted(_, checkpoint_id):
                for task in self.tasks.values():
                    task.checkpoint_completed(checkpoint_id)
            case m.CheckpointAborted(_, checkpoint_id):
                for task in self.tasks.values():
                    task.checkpoint_aborted(checkpoint_id)
            case m.ReadOn(_, checkpoint_id):
                for task in self.tasks.values():
                    task.read_on(checkpoint_id)
            case m.AssignSplit(_, ref, split, is_last):
                self._task(ref).add_split(split, is_last)
            case m.SplitsAssigned(_, ref):
                if ref not in self._finished:
                    self._task(ref).splits_assigned()
            case m.NoMoreSplits(_, ref):
                self._task(ref).no_more_splits()
            case m.StopSources():
                for task in self.tasks.values():
                    task.stop_source()
            case _:
                assert_never(message)

    def close(self) -> None:
        """End everything that runs here. The pool is whole afterwards."""
        self._commits.attempt_over()
        for task in self._all_tasks():
            task.close()
        for link in self._links.values():
            link.close()
        if self.pool is not None and self.pool.in_use:
            raise InvariantError(f"slot {self.slot_id}: {self.pool.in_use} buffers in use after the tasks are closed")
        self._reset()

    def status(self) -> m.SlotStatus:
        """For the heartbeat. Memory is for the process to fill in."""
        return m.SlotStatus(attempt=self.attempt, tasks=tuple(task.metrics() for task in self._all_tasks()))

    def show_rows(self, asked: ShowRows, answer: Callable[[RowsShown], None]) -> None:
        """For people; `answer` is called at most once for each task, and never where the operator does not run here."""
        for task in self.tasks.values():
            task.show(asked, answer)

    def operator_at_work(self) -> tuple[str, str, int]:
        """Name, uid and subtask of the operator that runs now; nothing between two steps."""
        task = self._at_work
        return ("", "", -1) if task is None else (*task.operator_at_work, task.ref.subtask)

    def check(self) -> None:
        """Every invariant that must hold between two mails."""
        if self.pool is not None:
            self.pool.check()
        for task in self.tasks.values():
            if task.is_live:
                task.check()
        for channels in self._remote.values():
            for channel in channels:
                channel.check()

    def _all_tasks(self) -> list[Task | FinishedTask]:
        """Those that run come first."""
        return [*self.tasks.values(), *self._finished.values()]

    def _task(self, ref: TaskId) -> Task:
        task = self.tasks.get(ref)
        if task is None:
            raise InvariantError(f"slot {self.slot_id} has no task {ref}")
        return task

    def _cancel(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.close()
        self._send(m.Cancelled(attempt))

    def _graph_of(self, message: m.Deploy | m.CommitSinks) -> bytes:
        self._graph = message.graph or self._graph
        if not self._graph:
            raise InvariantError(f"slot {self.slot_id} is to use the job's graph, and was never sent one")
        return self._graph

    # ---- deployment --------------------------------------------------------------

    def _deploy(self, deploy: m.Deploy) -> None:
        """Read the state on the I/O pool, then build, open and wire the tasks."""
        if self.state is not SlotState.IDLE:
            self.close()
        self.attempt = deploy.attempt
        self.state = SlotState.DEPLOYING
        config = msgspec.msgpack.decode(deploy.config, type=JobConfig)
        graph_bytes = self._graph_of(deploy)

        def work() -> tuple[Storage | None, dict[TaskId, _Loaded], _InFlight, ReadAhead]:
            storage = self._open_storage(deploy.checkpoint_root) if deploy.checkpoint_root is not None else None
            restored = msgspec.msgpack.decode(deploy.restore, type=m.Restored) if deploy.restore else m.Restored()
            restore, in_flight = dict(restored.tasks), dict(restored.channels)
            read_ahead: ReadAhead = {}
            if in_flight:
                assert storage is not None, "in-flight data to restore, but no storage"
                states = [state for states in in_flight.values() for state in states]
                # All of it before the first row is emitted, anywhere.
                read_ahead = verify_channels(storage, states, config.pool_bytes // READ_AHEAD_OF_POOL)
            loaded = {}
            ended: JobGraph | None = None
            for ref in deploy.tasks:
                # One per task: no two may share an operator. Those that had finished only need its edges.
                has_finished = ref in deploy.finished
                graph: JobGraph = ended if has_finished and ended is not None else self._unpickle(graph_bytes)
                ended = graph if has_finished else ended
                parallelism = graph.vertices[ref.vertex].parallelism
                owned = key_group_range(ref.subtask, parallelism, config.max_parallelism)
                task = loaded[ref] = _Loaded(graph, {}, {}, {})
                for snapshot in restore.get(ref, ()):
                    task.watermarks[snapshot.uid] = snapshot.watermark_in_us, snapshot.watermark_out_us
                    assert storage is not None, "state to restore, but no storage"
                    parts = read_parts(storage, snapshot.parts, owned, f"operator {snapshot.uid!r}")
                    task.parts[snapshot.uid] = parts
                    task.known.update(known_chunks(snapshot.parts, parts))
            return storage, loaded, in_flight, read_ahead

        def done(outcome: Done[tuple[Storage | None, dict[TaskId, _Loaded], _InFlight, ReadAhead]] | Failed) -> None:
            if self.attempt != deploy.attempt or self.state is not SlotState.DEPLOYING:
                return
            if isinstance(outcome, Failed):
                self._deploy_failed(deploy.attempt, outcome.error)
                return
            storage, loaded, in_flight, read_ahead = outcome.value
            try:
                graphs = {ref: of.graph for ref, of in loaded.items()}
                self._build(deploy, config, graphs, storage, in_flight, read_ahead)
                for ref, task in self.tasks.items():
                    self._at_work = task
                    task.open(loaded[ref].parts, loaded[ref].known, loaded[ref].watermarks)
            except BaseException as error:  # noqa: BLE001 - opening runs user code: any failure is the job's
                self._deploy_failed(deploy.attempt, error)
                return
            self._at_work = None
            self.state = SlotState.DEPLOYED
            self._send(m.Deployed(deploy.attempt))

        self._executor.submit(work, done)

    def _deploy_failed(self, attempt: int, error: BaseException) -> None:
        self.failure = error
        self.close()
        self._send(deploy_failed(attempt, error))

    def _build(
        self,
        deploy: m.Deploy,
        config: JobConfig,
        graphs: Mapping[TaskId, JobGraph],
        storage: Storage | None,
        in_flight: _InFlight,
        read_ahead: ReadAhead,
    ) -> None:
        """Tasks with their partitions and gates; channels between tasks of this slot are connected at once.

        `graphs`: one for each task, which has its operators.
        """
        pool = self.pool = BufferPool(config.pool_bytes, config.buffer_bytes)
        queue_time = None if config.queue_time_s is None else QueueTime(config.queue_time_s, self._clock.own_core_s)
        any_graph = next(iter(graphs.values()))
        seams = TaskSeams(
            job_id=deploy.job_id,
            attempt=deploy.attempt,
            epoch=deploy.epoch,
            clock=self._clock,
            executor=self._executor,
            ids=self._ids,
            storage=storage,
            overtakable=overtakable(any_graph),
            inline_bytes_max=inline_bytes_max(
                config.inline_bytes, sum(vertex.parallelism for vertex in any_graph.vertices)
            ),
            send=self._send,
            schedule=self._schedule,
        )
        partitions: dict[tuple[int, int], ResultPartition] = {}
        for ref, graph in graphs.items():
            for edge in graph.outputs(ref.vertex):
                partition = ResultPartition(
                    edge,
                    ref.subtask,
                    graph.consumers(edge, ref.subtask),
                    config.max_parallelism,
                    pool,
                    WINDOW_BUFFERS_MAX,
                    queue_time,
                )
                partitions[edge.id, ref.subtask] = partition
                for index, sub in enumerate(partition.subpartitions):
                    slot = deploy.slots[sub.channel.consumer]
                    if slot != self.slot_id:
                        self._outgoing.append((slot, partition, index))
        window = self._window(deploy, graphs, pool)
        for ref, graph in graphs.items():
            gates = []
            for number, edge in enumerate(graph.inputs(ref.vertex)):
                arrived = partial(self._arrived, ref, number)
                gate = InputGate(edge, ref.subtask, partial(self._wake_task, ref), arrived)
                gates.append(gate)
                self._wire(gate, graph, deploy, partitions, window, queue_time)
                states = [state for state in in_flight.get(ref, ()) if state.edge == edge.id]
                if states:
                    assert storage is not None, "in-flight data to restore, but no storage"
                    gate.recovered = GateRecovery(
                        edge,
                        states,
                        max_parallelism=config.max_parallelism,
                        pool=pool,
                        quota=pool.quota(f"recovered e{edge.id}/{ref.subtask}", reserved=1),
                        executor=self._executor,
                        storage=storage,
                        read_ahead=read_ahead,
                        wake=partial(self._wake_task, ref),
                        fail=partial(self._fail_task, deploy.attempt, ref),
                    )
            outputs = [partitions[edge.id, ref.subtask] for edge in graph.outputs(ref.vertex)]
            if ref in deploy.finished:
                self._finished[ref] = FinishedTask(ref, deploy.attempt, gates, outputs, self._send)
            else:
                self.tasks[ref] = Task(ref, graph, config, seams, gates, outputs)
        pool.check_capacity()

    def _window(self, deploy: m.Deploy, graphs: Mapping[TaskId, JobGraph], pool: BufferPool) -> int:
        """The credit window of every remote channel: at most half of the pool for all of them."""
        remote = sum(
            deploy.slots[producer] != self.slot_id
            for ref, graph in graphs.items()
            for edge in graph.inputs(ref.vertex)
            for producer in graph.producers(edge, ref.subtask)
        )
        share = pool.total // (2 * remote) if remote else WINDOW_BUFFERS_MAX
        return max(WINDOW_BUFFERS_MIN, min(WINDOW_BUFFERS_MAX, share))

    def _wire(
        self,
        gate: InputGate,
        graph: JobGraph,
        deploy: m.Deploy,
        partitions: dict[tuple[int, int], ResultPartition],
        window: int,
        queue_time: QueueTime | None,
    ) -> None:
        assert self.pool is not None
        edge, consumer = gate.edge, gate.consumer
        producers = graph.producers(edge, consumer)
        remote = sum(deploy.slots[producer] != self.slot_id for producer in producers)
        quota = self.pool.quota(f"input e{edge.id}/{consumer}", reserved=window * remote)
        channels: list[InputChannel] = []
        local: list[tuple[LocalChannel, int]] = []
        for index, producer in enumerate(producers):
            slot = deploy.slots[producer]
            if slot == self.slot_id:
                position = consumer if edge.partitioning.all_to_all else 0
                channel = LocalChannel(partitions[edge.id, producer].subpartitions[position])
                local.append((channel, index))
                channels.append(channel)
            else:
                remote_channel = RemoteChannel(
                    ChannelId(edge.id, producer, consumer),
                    edge.schema,
                    self.pool,
                    quota,
                    window,
                    on_data=partial(gate.on_data, index),
                    grant=partial(self._grant, slot),
                    queue_time=queue_time,
                )
                self._remote.setdefault(slot, []).append(remote_channel)
                channels.append(remote_channel)
        gate.set_channels(channels)
        for channel, index in local:
            channel.connect(partial(gate.on_data, index))

    def _grant(self, slot: int, channel: ChannelId, credits: int) -> None:
        link = self._links.get(slot)
        if link is not None:
            link.grant(channel, credits)

    def _start(self, peers: tuple[m.Peer, ...]) -> None:
        """All slots are deployed: connect, announce credit, run."""
        if self.state is not SlotState.DEPLOYED:
            raise InvariantError(f"slot {self.slot_id} is {self.state.name}, cannot start")
        self.state = SlotState.RUNNING
        rows_max = next(iter(self.tasks.values())).rows_max if self.tasks else 1
        needed = {slot for slot, _, _ in self._outgoing} | set(self._remote)
        assert self.pool is not None
        for peer in peers:
            if peer.slot not in needed:
                continue
            lost = partial(self._link_lost, self.attempt, peer.slot)
            link = PeerLink(peer.slot, self.pool.buffer_bytes, rows_max, lost)
            self._links[peer.slot] = link
            link.attach(self._transport.open(peer.slot, peer.host, peer.port, self.attempt, link))
            for channel in self._remote.get(peer.slot, ()):
                link.add_receiver(channel)
        for slot, partition, index in self._outgoing:
            self._links[slot].add_sender(partition.subpartitions[index])
        for task in self._all_tasks():
            task.start()

    def _link_lost(self, attempt: int, slot: int, reason: str) -> None:
        if attempt != self.attempt or self.state is not SlotState.RUNNING:
            return
        error = ClusterError(f"the connection to slot {slot} is lost: {reason}")
        edges = {channel.id.edge for channel in self._remote.get(slot, ())}
        edges |= {partition.edge.id for peer, partition, _ in self._outgoing if peer == slot}
        for task in self.tasks.values():
            if task.is_live and edges & task.edge_ids:
                task.fail(error, symptom=True)
                return

    # ---- running -----------------------------------------------------------------

    def _arrived(self, ref: TaskId, gate: int, channel: int, event: Arrival) -> None:
        task = self.tasks.get(ref)
        if task is not None:
            task.arrived(gate, channel, event)

    def _fail_task(self, attempt: int, ref: TaskId, error: BaseException) -> None:
        if attempt == self.attempt and ref in self.tasks:
            self.tasks[ref].fail(error)

    def _wake_task(self, ref: TaskId) -> None:
        task = self.tasks.get(ref)
        if task is not None:
            self._schedule(task)

    def _schedule(self, task: Task) -> None:
        if task not in self._scheduled and self.state is _RUNNING:
            self._scheduled.add(task)
            self._ready.append(task)
            if not self._run_posted:
                self._run_posted = True
                self._executor.post(partial(self._run, self.attempt))

    def _run(self, attempt: int) -> None:
        """A few steps, then back to the loop: sockets and completions must not wait for long."""
        if attempt != self.attempt or self.state is not _RUNNING:
            return
        clock, ready = self._clock, self._ready
        now_s = clock.monotonic_s()
        deadline_s = now_s + RUN_S
        had_mail = False
        for _ in range(STEPS_PER_MAIL):
            if not ready:
                break
            favoured = self._favoured < MAILS_IN_A_ROW_MAX
            task = ready[0]
            if favoured and not task.mails:
                for other in ready:
                    if other.mails:
                        task = other
                        break
            if favoured and task.mails:
                self._favoured += 1
            elif had_mail and favoured:
                break  # a barrier must not wait in a socket for the slice of a slow function
            else:
                self._favoured = 0
            had_mail = bool(task.mails)
            ready.remove(task)
            self._scheduled.discard(task)
            self._at_work = task
            if task.step(now_s):
                self._schedule(task)
            self._at_work = None
            before_s, now_s = now_s, clock.monotonic_s()
            task.busy_s += now_s - before_s
            if now_s >= deadline_s:
                break
        if ready:
            self._executor.post(partial(self._run, attempt))
        else:
            self._run_posted = False
