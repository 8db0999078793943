"""NEXMark: an auction house as a stream, and queries on it.

Reading order: `generator`, `streams`; `rows`, `joins`, `windowed`, `reports`; `queries`, `expected`, then `running`.
"""

from midstream_lab.bench.nexmark.running import run as run
