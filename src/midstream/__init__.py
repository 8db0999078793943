"""midstream: a stateful stream processor for Python that runs on Spark.

The public names stand here, in `midstream.connectors` (the classes of sources and sinks) and in `midstream.testing`;
all other modules may change. Names are imported when they are first used, since a slot and the command line need few.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.api.changed_state import write_savepoint as write_savepoint
    from midstream.api.connected_streams import BroadcastConnectedStreams as BroadcastConnectedStreams
    from midstream.api.connected_streams import ConnectedStreams as ConnectedStreams
    from midstream.api.data_stream import BroadcastStream as BroadcastStream
    from midstream.api.data_stream import DataStream as DataStream
    from midstream.api.environment import Environment as Environment
    from midstream.api.keyed_streams import KeyedStream as KeyedStream
    from midstream.api.restart_strategies import exponential_restarts as exponential_restarts
    from midstream.api.restart_strategies import fixed_restarts as fixed_restarts
    from midstream.api.restart_strategies import no_restart as no_restart
    from midstream.api.stream_sinks import StreamSink as StreamSink
    from midstream.api.tuning import Tuning as Tuning
    from midstream.api.windowed_streams import WindowedStream as WindowedStream
    from midstream.connectors.files.file_source import CsvOptions as CsvOptions
    from midstream.connectors.memory.collect_sink import CollectSink as CollectSink
    from midstream.engine.core.config import Duration as Duration
    from midstream.engine.core.config import RestartStrategy as RestartStrategy
    from midstream.engine.core.errors import ClusterError as ClusterError
    from midstream.engine.core.errors import ConfigError as ConfigError
    from midstream.engine.core.errors import DataError as DataError
    from midstream.engine.core.errors import JobError as JobError
    from midstream.engine.core.errors import MidstreamError as MidstreamError
    from midstream.engine.core.errors import SchemaError as SchemaError
    from midstream.engine.core.errors import StorageError as StorageError
    from midstream.engine.core.errors import UnavailableError as UnavailableError
    from midstream.engine.core.schemas import SchemaLike as SchemaLike
    from midstream.engine.operators.bad_records import BAD_RECORDS as BAD_RECORDS
    from midstream.engine.operators.failed_rows import FAILED as FAILED
    from midstream.engine.operators.failed_rows import FAILED_RIGHT as FAILED_RIGHT
    from midstream.engine.operators.functions.batch_functions import BatchContext as BatchContext
    from midstream.engine.operators.functions.batch_functions import CoBatchFunction as CoBatchFunction
    from midstream.engine.operators.functions.batch_functions import KeyedBatchFunction as KeyedBatchFunction
    from midstream.engine.operators.functions.process_functions import (
        BroadcastProcessFunction as BroadcastProcessFunction,
    )
    from midstream.engine.operators.functions.process_functions import CoProcessFunction as CoProcessFunction
    from midstream.engine.operators.functions.process_functions import KeyedProcessFunction as KeyedProcessFunction
    from midstream.engine.operators.functions.process_functions import ProcessContext as ProcessContext
    from midstream.engine.operators.functions.process_functions import ProcessFunction as ProcessFunction
    from midstream.engine.operators.functions.window_functions import WindowContext as WindowContext
    from midstream.engine.operators.functions.window_functions import WindowFunction as WindowFunction
    from midstream.engine.operators.sink_api import Committer as Committer
    from midstream.engine.operators.sink_api import CommitterContext as CommitterContext
    from midstream.engine.operators.sink_api import Sink as Sink
    from midstream.engine.operators.sink_api import SinkWriter as SinkWriter
    from midstream.engine.operators.sink_api import WriterContext as WriterContext
    from midstream.engine.operators.source_api import Discovery as Discovery
    from midstream.engine.operators.source_api import DiscoveryContext as DiscoveryContext
    from midstream.engine.operators.source_api import Source as Source
    from midstream.engine.operators.source_api import Split as Split
    from midstream.engine.operators.source_api import SplitReader as SplitReader
    from midstream.engine.operators.watermarks import WatermarkStrategy as WatermarkStrategy
    from midstream.engine.operators.windows.aggregates import Accumulator as Accumulator
    from midstream.engine.operators.windows.aggregates import Aggregate as Aggregate
    from midstream.engine.operators.windows.aggregates import ArgMax as ArgMax
    from midstream.engine.operators.windows.aggregates import ArgMin as ArgMin
    from midstream.engine.operators.windows.aggregates import Count as Count
    from midstream.engine.operators.windows.aggregates import First as First
    from midstream.engine.operators.windows.aggregates import Last as Last
    from midstream.engine.operators.windows.aggregates import Max as Max
    from midstream.engine.operators.windows.aggregates import Mean as Mean
    from midstream.engine.operators.windows.aggregates import Min as Min
    from midstream.engine.operators.windows.aggregates import Sum as Sum
    from midstream.engine.operators.windows.distinct_count import CountDistinct as CountDistinct
    from midstream.engine.operators.windows.moments import Covariance as Covariance
    from midstream.engine.operators.windows.moments import StdDev as StdDev
    from midstream.engine.operators.windows.moments import Variance as Variance
    from midstream.engine.operators.windows.sketches import ApproxCountDistinct as ApproxCountDistinct
    from midstream.engine.operators.windows.sketches import Quantile as Quantile
    from midstream.engine.operators.windows.value_lists import Collect as Collect
    from midstream.engine.operators.windows.value_lists import TopN as TopN
    from midstream.engine.operators.windows.window_factory import LATE as LATE
    from midstream.engine.operators.windows.window_factory import LATE_RIGHT as LATE_RIGHT
    from midstream.engine.operators.windows.window_factory import count as count
    from midstream.engine.operators.windows.window_factory import session as session
    from midstream.engine.operators.windows.window_factory import sliding as sliding
    from midstream.engine.operators.windows.window_factory import tumbling as tumbling
    from midstream.engine.protocol.job_status import JobStatus as JobStatus
    from midstream.engine.state.keyed_states import BroadcastState as BroadcastState
    from midstream.engine.state.keyed_states import ListState as ListState
    from midstream.engine.state.keyed_states import MapState as MapState
    from midstream.engine.state.keyed_states import ReducingState as ReducingState
    from midstream.engine.state.keyed_states import ValueState as ValueState
    from midstream.engine.state.table_state import TableState as TableState
    from midstream.engine.state.time_to_live import StateTtl as StateTtl
    from midstream.inprocess.preview import Preview as Preview
    from midstream.runtime.driver.job import Job as Job
    from midstream.runtime.process.process_slots import ProcessSlots as ProcessSlots
    from midstream.runtime.storage.stored_checkpoint import read_state as read_state
    from midstream.spark.state_source import StateSource as StateSource

    __version__: str

_HOME = {
    "api.changed_state": "write_savepoint",
    "api.connected_streams": "BroadcastConnectedStreams ConnectedStreams",
    "api.environment": "Environment",
    "api.keyed_streams": "KeyedStream",
    "api.restart_strategies": "exponential_restarts fixed_restarts no_restart",
    "api.data_stream": "BroadcastStream DataStream",
    "api.stream_sinks": "StreamSink",
    "api.tuning": "Tuning",
    "api.windowed_streams": "WindowedStream",
    "connectors.memory.collect_sink": "CollectSink",
    "connectors.files.file_source": "CsvOptions",
    "engine.core.config": "Duration RestartStrategy",
    "engine.core.errors": "ClusterError ConfigError DataError JobError MidstreamError SchemaError StorageError UnavailableError",
    "engine.core.schemas": "SchemaLike",
    "inprocess.preview": "Preview",
    "engine.operators.windows.aggregates": "Accumulator Aggregate ArgMax ArgMin Count First Last Max Mean Min Sum",
    "engine.operators.windows.distinct_count": "CountDistinct",
    "engine.operators.windows.moments": "Covariance StdDev Variance",
    "engine.operators.windows.sketches": "ApproxCountDistinct Quantile",
    "engine.operators.windows.value_lists": "Collect TopN",
    "engine.operators.bad_records": "BAD_RECORDS",
    "engine.operators.failed_rows": "FAILED FAILED_RIGHT",
    "engine.operators.functions.batch_functions": "BatchContext CoBatchFunction KeyedBatchFunction",
    "engine.operators.functions.process_functions": "BroadcastProcessFunction CoProcessFunction KeyedProcessFunction ProcessContext ProcessFunction",
    "engine.operators.functions.window_functions": "WindowContext WindowFunction",
    "engine.operators.sink_api": "Committer CommitterContext Sink SinkWriter WriterContext",
    "engine.operators.source_api": "Discovery DiscoveryContext Source Split SplitReader",
    "engine.operators.watermarks": "WatermarkStrategy",
    "engine.operators.windows.window_factory": "LATE LATE_RIGHT count session sliding tumbling",
    "engine.protocol.job_status": "JobStatus",
    "runtime.driver.job": "Job",
    "runtime.process.process_slots": "ProcessSlots",
    "runtime.storage.stored_checkpoint": "read_state",
    "spark.state_source": "StateSource",
    "engine.state.keyed_states": "BroadcastState ListState MapState ReducingState ValueState",
    "engine.state.table_state": "TableState",
    "engine.state.time_to_live": "StateTtl",
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
