"""midstream: a stateful stream processor for Python that runs on Spark.

The public names stand here, in `midstream.connectors` (the classes of sources and sinks) and in `midstream.testing`;
all other modules may change. Names are imported when they are first used, since a slot and the command line need few.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.api.connected import BroadcastConnectedStreams as BroadcastConnectedStreams
    from midstream.api.connected import ConnectedStreams as ConnectedStreams
    from midstream.api.environment import Environment as Environment
    from midstream.api.keyed import KeyedStream as KeyedStream
    from midstream.api.keyed import WindowedStream as WindowedStream
    from midstream.api.restarts import exponential_restarts as exponential_restarts
    from midstream.api.restarts import fixed_restarts as fixed_restarts
    from midstream.api.restarts import no_restart as no_restart
    from midstream.api.stream import BroadcastStream as BroadcastStream
    from midstream.api.stream import DataStream as DataStream
    from midstream.api.writable import StreamSink as StreamSink
    from midstream.connectors.collect import CollectSink as CollectSink
    from midstream.connectors.files import CsvOptions as CsvOptions
    from midstream.core.config import Duration as Duration
    from midstream.core.config import RestartStrategy as RestartStrategy
    from midstream.core.errors import ClusterError as ClusterError
    from midstream.core.errors import ConfigError as ConfigError
    from midstream.core.errors import DataError as DataError
    from midstream.core.errors import JobError as JobError
    from midstream.core.errors import MidstreamError as MidstreamError
    from midstream.core.errors import SchemaError as SchemaError
    from midstream.core.errors import StorageError as StorageError
    from midstream.core.errors import UnavailableError as UnavailableError
    from midstream.core.schemas import SchemaLike as SchemaLike
    from midstream.inprocess.preview import Preview as Preview
    from midstream.operators.aggregates import Accumulator as Accumulator
    from midstream.operators.aggregates import Aggregate as Aggregate
    from midstream.operators.aggregates import Count as Count
    from midstream.operators.aggregates import First as First
    from midstream.operators.aggregates import Last as Last
    from midstream.operators.aggregates import Max as Max
    from midstream.operators.aggregates import Mean as Mean
    from midstream.operators.aggregates import Min as Min
    from midstream.operators.aggregates import Sum as Sum
    from midstream.operators.bad_records import BAD_RECORDS as BAD_RECORDS
    from midstream.operators.batch_functions import BatchContext as BatchContext
    from midstream.operators.batch_functions import CoBatchFunction as CoBatchFunction
    from midstream.operators.batch_functions import KeyedBatchFunction as KeyedBatchFunction
    from midstream.operators.process import BroadcastProcessFunction as BroadcastProcessFunction
    from midstream.operators.process import CoProcessFunction as CoProcessFunction
    from midstream.operators.process import KeyedProcessFunction as KeyedProcessFunction
    from midstream.operators.process import ProcessContext as ProcessContext
    from midstream.operators.sink import Committer as Committer
    from midstream.operators.sink import CommitterContext as CommitterContext
    from midstream.operators.sink import Sink as Sink
    from midstream.operators.sink import SinkWriter as SinkWriter
    from midstream.operators.sink import WriterContext as WriterContext
    from midstream.operators.source import Discovery as Discovery
    from midstream.operators.source import DiscoveryContext as DiscoveryContext
    from midstream.operators.source import Source as Source
    from midstream.operators.source import Split as Split
    from midstream.operators.source import SplitReader as SplitReader
    from midstream.operators.watermarks import WatermarkStrategy as WatermarkStrategy
    from midstream.operators.windows import LATE as LATE
    from midstream.operators.windows import session as session
    from midstream.operators.windows import sliding as sliding
    from midstream.operators.windows import tumbling as tumbling
    from midstream.protocol.job_status import JobStatus as JobStatus
    from midstream.runtime.job import Job as Job
    from midstream.runtime.processes import ProcessSlots as ProcessSlots
    from midstream.state.keyed import BroadcastState as BroadcastState
    from midstream.state.keyed import ListState as ListState
    from midstream.state.keyed import MapState as MapState
    from midstream.state.keyed import ReducingState as ReducingState
    from midstream.state.keyed import ValueState as ValueState
    from midstream.state.table import TableState as TableState

    __version__: str

_HOME = {
    "api.connected": "BroadcastConnectedStreams ConnectedStreams",
    "api.environment": "Environment",
    "api.keyed": "KeyedStream WindowedStream",
    "api.restarts": "exponential_restarts fixed_restarts no_restart",
    "api.stream": "BroadcastStream DataStream",
    "api.writable": "StreamSink",
    "connectors.collect": "CollectSink",
    "connectors.files": "CsvOptions",
    "core.config": "Duration RestartStrategy",
    "core.errors": "ClusterError ConfigError DataError JobError MidstreamError SchemaError StorageError UnavailableError",
    "core.schemas": "SchemaLike",
    "inprocess.preview": "Preview",
    "operators.aggregates": "Accumulator Aggregate Count First Last Max Mean Min Sum",
    "operators.bad_records": "BAD_RECORDS",
    "operators.batch_functions": "BatchContext CoBatchFunction KeyedBatchFunction",
    "operators.process": "BroadcastProcessFunction CoProcessFunction KeyedProcessFunction ProcessContext",
    "operators.sink": "Committer CommitterContext Sink SinkWriter WriterContext",
    "operators.source": "Discovery DiscoveryContext Source Split SplitReader",
    "operators.watermarks": "WatermarkStrategy",
    "operators.windows": "LATE session sliding tumbling",
    "protocol.job_status": "JobStatus",
    "runtime.job": "Job",
    "runtime.processes": "ProcessSlots",
    "state.keyed": "BroadcastState ListState MapState ReducingState ValueState",
    "state.table": "TableState",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - the same names as above; a test compares


if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("importlib.metadata").version(__name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
