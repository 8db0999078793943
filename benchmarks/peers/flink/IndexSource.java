package midstream.peers;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.connector.source.Boundedness;
import org.apache.flink.api.connector.source.ReaderOutput;
import org.apache.flink.api.connector.source.Source;
import org.apache.flink.api.connector.source.SourceReader;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.connector.source.SourceSplit;
import org.apache.flink.api.connector.source.SplitEnumerator;
import org.apache.flink.api.connector.source.SplitEnumeratorContext;
import org.apache.flink.api.java.typeutils.ResultTypeQueryable;
import org.apache.flink.core.io.InputStatus;
import org.apache.flink.core.io.SimpleVersionedSerializer;

/**
 * Rows made from their number: split s of P has rows j = 0 .. rowsPerSplit - 1, and subtask s reads it. Exactly
 * once: the position is checkpointed. One row per poll, as Flink wants it: between two rows a barrier can pass.
 */
public final class IndexSource<T>
        implements Source<T, IndexSource.Split, List<IndexSource.Split>>, ResultTypeQueryable<T> {

    /** Row j of split `split`; pure. */
    public interface Generator<T> extends Serializable {
        T make(int split, long j);

        long timestampMs(int split, long j);
    }

    private final Generator<T> generator;
    private final TypeInformation<T> type;
    private final int splits;
    private final long rowsPerSplit;
    private final double rowsPerSecond;
    private final double maxSeconds;

    /**
     * `rowsPerSplit`: Long.MAX_VALUE is unbounded. `rowsPerSecond`: of each split, 0 is as fast as possible.
     * `maxSeconds`: the input ends so long after a reader's first row, 0 is never.
     */
    public IndexSource(
            Generator<T> generator,
            TypeInformation<T> type,
            int splits,
            long rowsPerSplit,
            double rowsPerSecond,
            double maxSeconds) {
        this.generator = generator;
        this.type = type;
        this.splits = splits;
        this.rowsPerSplit = rowsPerSplit;
        this.rowsPerSecond = rowsPerSecond;
        this.maxSeconds = maxSeconds;
    }

    @Override
    public Boundedness getBoundedness() {
        return Boundedness.CONTINUOUS_UNBOUNDED;
    }

    @Override
    public SourceReader<T, Split> createReader(SourceReaderContext context) {
        return new Reader();
    }

    @Override
    public SplitEnumerator<Split, List<Split>> createEnumerator(SplitEnumeratorContext<Split> context) {
        List<Split> all = new ArrayList<>();
        for (int s = 0; s < splits; s++) {
            all.add(new Split(s, 0));
        }
        return new Enumerator(context, all);
    }

    @Override
    public SplitEnumerator<Split, List<Split>> restoreEnumerator(
            SplitEnumeratorContext<Split> context, List<Split> pending) {
        return new Enumerator(context, pending);
    }

    @Override
    public SimpleVersionedSerializer<Split> getSplitSerializer() {
        return new SplitSerializer();
    }

    @Override
    public SimpleVersionedSerializer<List<Split>> getEnumeratorCheckpointSerializer() {
        return new SplitsSerializer();
    }

    @Override
    public TypeInformation<T> getProducedType() {
        return type;
    }

    /** Where a split's reader is. */
    public static final class Split implements SourceSplit {
        final int number;
        long next;

        Split(int number, long next) {
            this.number = number;
            this.next = next;
        }

        @Override
        public String splitId() {
            return Integer.toString(number);
        }
    }

    private static final class Enumerator implements SplitEnumerator<Split, List<Split>> {
        private final SplitEnumeratorContext<Split> context;
        private final Map<Integer, List<Split>> pending = new HashMap<>();

        Enumerator(SplitEnumeratorContext<Split> context, List<Split> splits) {
            this.context = context;
            for (Split split : splits) {
                pending.computeIfAbsent(split.number, s -> new ArrayList<>()).add(split);
            }
        }

        @Override
        public void start() {}

        @Override
        public void handleSplitRequest(int subtask, String host) {}

        @Override
        public void addSplitsBack(List<Split> splits, int subtask) {
            pending.computeIfAbsent(subtask, s -> new ArrayList<>()).addAll(splits);
            if (context.registeredReaders().containsKey(subtask)) {
                addReader(subtask);
            }
        }

        @Override
        public void addReader(int subtask) {
            List<Split> splits = pending.remove(subtask);
            if (splits != null) {
                splits.forEach(split -> context.assignSplit(split, subtask));
            }
        }

        @Override
        public List<Split> snapshotState(long checkpointId) {
            List<Split> all = new ArrayList<>();
            pending.values().forEach(all::addAll);
            return all;
        }

        @Override
        public void close() {}
    }

    private final class Reader implements SourceReader<T, Split> {
        private static final int CLOCK_EVERY = 64;

        private final List<Split> mine = new ArrayList<>();
        private int turn;
        private long emitted;
        private long beganNs;
        private CompletableFuture<Void> available = new CompletableFuture<>();
        private ScheduledExecutorService timer;

        @Override
        public void start() {}

        @Override
        public InputStatus pollNext(ReaderOutput<T> output) {
            if (mine.isEmpty()) {
                return InputStatus.NOTHING_AVAILABLE;
            }
            if (emitted == 0) {
                beganNs = System.nanoTime();
            }
            if (rowsPerSecond > 0 && emitted > (System.nanoTime() - beganNs) * 1e-9 * rowsPerSecond) {
                available = new CompletableFuture<>();
                CompletableFuture<Void> waiting = available;
                if (timer == null) {
                    timer = Executors.newSingleThreadScheduledExecutor();
                }
                timer.schedule(() -> waiting.complete(null), 1, TimeUnit.MILLISECONDS);
                return InputStatus.NOTHING_AVAILABLE;
            }
            if (maxSeconds > 0
                    && emitted % CLOCK_EVERY == 0
                    && (System.nanoTime() - beganNs) * 1e-9 > maxSeconds) {
                return InputStatus.END_OF_INPUT;
            }
            Split split = mine.get(turn);
            if (split.next >= rowsPerSplit) {
                mine.remove(turn);
                turn = 0;
                return mine.isEmpty() ? InputStatus.END_OF_INPUT : InputStatus.MORE_AVAILABLE;
            }
            long j = split.next++;
            emitted++;
            if (mine.size() > 1) {
                turn = (turn + 1) % mine.size();
            }
            output.collect(generator.make(split.number, j), generator.timestampMs(split.number, j));
            return InputStatus.MORE_AVAILABLE;
        }

        @Override
        public List<Split> snapshotState(long checkpointId) {
            List<Split> copy = new ArrayList<>();
            mine.forEach(split -> copy.add(new Split(split.number, split.next)));
            return copy;
        }

        @Override
        public CompletableFuture<Void> isAvailable() {
            return available;
        }

        @Override
        public void addSplits(List<Split> splits) {
            mine.addAll(splits);
            available.complete(null);
        }

        @Override
        public void notifyNoMoreSplits() {}

        @Override
        public void close() {
            if (timer != null) {
                timer.shutdownNow();
            }
        }
    }

    private static final class SplitSerializer implements SimpleVersionedSerializer<Split> {
        @Override
        public int getVersion() {
            return 1;
        }

        @Override
        public byte[] serialize(Split split) throws IOException {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream(12);
            DataOutputStream out = new DataOutputStream(bytes);
            out.writeInt(split.number);
            out.writeLong(split.next);
            return bytes.toByteArray();
        }

        @Override
        public Split deserialize(int version, byte[] bytes) throws IOException {
            DataInputStream in = new DataInputStream(new ByteArrayInputStream(bytes));
            return new Split(in.readInt(), in.readLong());
        }
    }

    private static final class SplitsSerializer implements SimpleVersionedSerializer<List<Split>> {
        private static final int SPLIT_BYTES = 12;

        @Override
        public int getVersion() {
            return 1;
        }

        @Override
        public byte[] serialize(List<Split> splits) throws IOException {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            for (Split split : splits) {
                bytes.write(new SplitSerializer().serialize(split));
            }
            return bytes.toByteArray();
        }

        @Override
        public List<Split> deserialize(int version, byte[] bytes) throws IOException {
            DataInputStream in = new DataInputStream(new ByteArrayInputStream(bytes));
            List<Split> splits = new ArrayList<>();
            for (int at = 0; at < bytes.length; at += SPLIT_BYTES) {
                splits.add(new Split(in.readInt(), in.readLong()));
            }
            return splits;
        }
    }
}
