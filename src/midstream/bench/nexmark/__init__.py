"""NEXMark: an auction house as a stream, and queries on it. `generator`, `queries`, `expected`, then `running`."""

from midstream.bench.nexmark.running import run as run
