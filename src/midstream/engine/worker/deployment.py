"""Builds the tasks of one attempt in one slot, with their partitions, gates and channels, from a `Deploy` message.

`load` reads on the I/O pool the state that the message refers to. `Deployment` builds everything from the message and
that state alone. I/O of an older attempt that completes late is delivered to that attempt's deployment, which is closed
and ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from midstream.engine.checkpoint.channel_state import ReadAhead, verify_channels
from midstream.engine.checkpoint.held_chunks import HeldChunks
from midstream.engine.checkpoint.state_files import in_memory, known_chunks, read_parts
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ClusterError, InvariantError
from midstream.engine.core.ids import ChannelId, TaskId
from midstream.engine.core.interfaces import Storage, Transport
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.element_queue import QueueTime
from midstream.engine.exchange.input_channel import InputChannel, LocalChannel, RemoteChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.peer_link import PeerLink
from midstream.engine.exchange.pool_minimum import WINDOW_BUFFERS_MAX, WINDOW_BUFFERS_MIN
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, JobGraph
from midstream.engine.protocol import messages as m
from midstream.engine.worker.finished_on_restore import FinishedOnRestoreTask
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.state_memory import RestoredTables
from midstream.engine.worker.task import Task
from midstream.engine.worker.task_operators import RestoredOperators

READ_AHEAD_OF_POOL = 4
"""Rows in flight that are read while they are verified stay in memory, up to 1/4 of the pool's size. They are not
charged to the pool."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that is read from storage, or unpickled, for one attempt in one slot."""

    storage: Storage | None
    graphs: dict[TaskId, JobGraph]
    """Each task has a graph of its own, because it runs the operators in it."""
    restored: dict[TaskId, RestoredOperators]
    in_flight: dict[TaskId, tuple[m.ChannelState, ...]]
    read_ahead: ReadAhead


def load(
    deploy: m.Deploy,
    config: JobConfig,
    open_storage: Callable[[str], Storage],
    unpickle: Callable[[], JobGraph],
    restored_tables: RestoredTables | None = None,
    held: HeldChunks | None = None,
) -> Loaded:
    """Read and verify everything that the tasks start from. It runs on the I/O pool.

    Each call of `unpickle` returns another graph with other operators. `restored_tables`: where tables of state are kept;
    None: in memory. `held`: what the slot still has of an earlier attempt.
    """
    storage = open_storage(deploy.checkpoint_root) if deploy.checkpoint_root is not None else None
    restored = msgspec.msgpack.decode(deploy.restore, type=m.Restored) if deploy.restore else m.Restored()
    restore, in_flight = dict(restored.tasks), dict(restored.channels)
    read_ahead: ReadAhead = {}
    if in_flight:
        assert storage is not None, "in-flight data to restore, but no storage"
        states = [state for states in in_flight.values() for state in states]
        # Everything is verified before any task emits its first row: damage must not show halfway through.
        read_ahead = verify_channels(storage, states, config.pool_bytes // READ_AHEAD_OF_POOL)
    keep = in_memory if restored_tables is None else restored_tables.keep
    graphs, tasks = {}, {}
    ended: JobGraph | None = None
    for ref in deploy.tasks:
        # Two tasks must not share an operator. Tasks that had finished only use the edges, so they share one graph.
        has_finished = ref in deploy.finished
        graph = ended if has_finished and ended is not None else unpickle()
        ended = graph if has_finished else ended
        owned = key_group_range(ref.subtask, graph.vertices[ref.vertex].parallelism, config.max_parallelism)
        graphs[ref], tasks[ref] = graph, (task := RestoredOperators())
        for snapshot in restore.get(ref, ()):
            task.watermarks[snapshot.uid] = snapshot.watermark_in_us, snapshot.watermark_out_us
            assert storage is not None, "state to restore, but no storage"
            parts = read_parts(storage, snapshot.parts, owned, f"operator {snapshot.uid!r}", keep, held)
            task.parts[snapshot.uid] = parts
            task.known.update(known_chunks(snapshot.parts, parts))
    return Loaded(storage, graphs, tasks, in_flight, read_ahead)


class Deployment:
    """The tasks, channels and pool of one attempt in one slot: built from a `Deploy`, connected at the `Start`, and
    closed as a whole.

    It keeps no reference to `loaded`, except for what its tasks use: otherwise the restored state would stay in memory
    a second time.
    """

    def __init__(self, slot_id: int, deploy: m.Deploy, loaded: Loaded, services: TaskServices) -> None:
        config = services.config
        self.slot_id = slot_id
        self._slot_of = deploy.slots
        self._services = services
        self.pool = BufferPool(config.pool_bytes, config.buffer_bytes)
        self._queue_time = (
            None if config.queue_time_s is None else QueueTime(config.queue_time_s, services.clock.own_core_s)
        )
        self.tasks: dict[TaskId, Task] = {}
        """The tasks that run."""
        self.finished: dict[TaskId, FinishedOnRestoreTask] = {}
        """The stand-ins for tasks of this slot that had finished in the checkpoint."""
        self._partitions: dict[tuple[int, int], ResultPartition] = {}
        """The partitions by edge and producing subtask."""
        self._links: dict[int, PeerLink] = {}
        """The links by peer slot. They are attached to their connections by `connect`."""
        for ref, graph in loaded.graphs.items():
            for edge in graph.outputs(ref.vertex):
                self._add_partition(edge, ref, graph)
        window = self._window(loaded.graphs)
        for ref, graph in loaded.graphs.items():
            gates = [self._gate(edge, ref, loaded, window) for edge in graph.inputs(ref.vertex)]
            outputs = [self._partitions[edge.id, ref.subtask] for edge in graph.outputs(ref.vertex)]
            if ref in deploy.finished:
                self.finished[ref] = FinishedOnRestoreTask(ref, deploy.attempt, gates, outputs, services.send)
            else:
                self.tasks[ref] = Task(ref, graph, services, gates, outputs)
        self.pool.check_capacity()

    @property
    def all_tasks(self) -> list[Task | FinishedOnRestoreTask]:
        """All tasks of the slot: first those that run, then the stand-ins for those that had finished."""
        return [*self.tasks.values(), *self.finished.values()]

    def connect(self, peers: Sequence[m.Peer], transport: Transport) -> None:
        """Open a connection to every slot that shares a channel with this one. All slots are deployed by now."""
        assert self._links.keys() <= {peer.slot for peer in peers}, (self.slot_id, self._links.keys(), peers)
        for peer in peers:
            link = self._links.get(peer.slot)
            if link is not None:
                link.attach(transport.open(peer.slot, peer.host, peer.port, self._services.attempt, link))

    def close(self) -> None:
        """Close all tasks and connections. Every buffer is back in the pool afterwards."""
        for task in self.all_tasks:
            task.close()
        for link in self._links.values():
            link.close()
        if self.pool.in_use:
            raise InvariantError(f"slot {self.slot_id}: {self.pool.in_use} buffers in use after the tasks are closed")

    def check(self) -> None:
        """Check every invariant that must hold between two mails."""
        self.pool.check()
        for task in self.tasks.values():
            if task.is_live:
                task.check()
        for link in self._links.values():
            link.check()

    # ---- building ----

    def _add_partition(self, edge: Edge, ref: TaskId, graph: JobGraph) -> None:
        consumers, groups = graph.consumers(edge, ref.subtask), self._services.config.max_parallelism
        partition = ResultPartition(
            edge, ref.subtask, consumers, groups, self.pool, WINDOW_BUFFERS_MAX, self._queue_time
        )
        self._partitions[edge.id, ref.subtask] = partition
        for sub in partition.subpartitions:
            slot = self._slot_of[sub.channel.consumer]
            if slot != self.slot_id:
                self._link(slot).add_sender(sub)

    def _link(self, slot: int) -> PeerLink:
        if slot not in self._links:
            config, on_lost = self._services.config, partial(self._link_lost, slot)
            self._links[slot] = PeerLink(slot, config.buffer_bytes, config.batch_rows, on_lost)
        return self._links[slot]

    def _window(self, graphs: Mapping[TaskId, JobGraph]) -> int:
        """The credit window of each remote channel, in buffers. All windows together take at most half of the pool, and
        leave what outputs have reserved and a buffer of each input for rows to be recovered.
        """
        inputs = sum(len(graph.inputs(ref.vertex)) for ref, graph in graphs.items())
        room = min(self.pool.total // 2, self.pool.shared_free - inputs)
        remote = sum(
            self._slot_of[producer] != self.slot_id
            for ref, graph in graphs.items()
            for edge in graph.inputs(ref.vertex)
            for producer in graph.producers(edge, ref.subtask)
        )
        share = room // remote if remote else WINDOW_BUFFERS_MAX
        return max(WINDOW_BUFFERS_MIN, min(WINDOW_BUFFERS_MAX, share))

    def _gate(self, edge: Edge, ref: TaskId, loaded: Loaded, window: int) -> InputGate:
        """The gate of one input, with its channels. They have no data, because no task has emitted anything yet."""
        producers = loaded.graphs[ref].producers(edge, ref.subtask)
        remote = sum(self._slot_of[producer] != self.slot_id for producer in producers)
        quota = self.pool.quota(f"input e{edge.id}/{ref.subtask}", reserved=window * remote)
        channels: list[InputChannel] = []
        for producer in producers:
            slot = self._slot_of[producer]
            if slot == self.slot_id:
                position = ref.subtask if edge.partitioning.all_to_all else 0
                channels.append(LocalChannel(self._partitions[edge.id, producer].subpartitions[position]))
            else:
                channel, link = ChannelId(edge.id, producer, ref.subtask), self._link(slot)
                remote_channel = RemoteChannel(channel, edge.layouts, quota, window, link.grant, self._queue_time)
                link.add_receiver(remote_channel)
                channels.append(remote_channel)
        gate = InputGate(edge, ref.subtask, channels)
        states = [state for state in loaded.in_flight.get(ref, ()) if state.edge == edge.id]
        if states:
            gate.recovered = GateRecovery(
                edge,
                states,
                quota=self.pool.quota(f"recovered e{edge.id}/{ref.subtask}", reserved=1),
                services=self._services,
                read_ahead=loaded.read_ahead,
                wake=partial(self._wake, ref),
                fail=partial(self._fail, ref),
            )
        return gate

    # ---- callbacks of recoveries and links ----

    def _wake(self, ref: TaskId) -> None:
        self.tasks[ref].wake()

    def _fail(self, ref: TaskId, error: BaseException) -> None:
        self.tasks[ref].fail(error)

    def _link_lost(self, slot: int, reason: str) -> None:
        """Fail one of the tasks that need the connection, as a symptom of a failure elsewhere.

        The connection does not call this after `close`, which closes it.
        """
        error = ClusterError(f"the connection to slot {slot} is lost: {reason}")
        edges = self._links[slot].edges
        for task in self.tasks.values():
            ends = {gate.edge.id for gate in task.gates} | {partition.edge.id for partition in task.partitions}
            if task.is_live and edges & ends:
                task.fail(error, symptom=True)
                return
