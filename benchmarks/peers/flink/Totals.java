package midstream.peers;

import java.io.Serializable;
import org.apache.flink.api.common.accumulators.Accumulator;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;
import org.apache.flink.util.Collector;

/** The sink of the benchmarks: adds numbers up per row; exactly once, for the sums are in the checkpoints. */
public final class Totals<T> extends RichFlatMapFunction<T, Long> implements CheckpointedFunction {

    public interface Measure<T> extends Serializable {
        void add(T row, double[] sums);
    }

    /** Whole numbers are exact up to 2**53. */
    public static final class Sums implements Accumulator<double[], double[]> {
        final double[] sums;

        public Sums(int length) {
            sums = new double[length];
        }

        @Override
        public void add(double[] other) {
            for (int i = 0; i < sums.length; i++) {
                sums[i] += other[i];
            }
        }

        @Override
        public double[] getLocalValue() {
            return sums;
        }

        @Override
        public void resetLocal() {
            java.util.Arrays.fill(sums, 0);
        }

        @Override
        public void merge(Accumulator<double[], double[]> other) {
            add(other.getLocalValue());
        }

        @Override
        public Accumulator<double[], double[]> clone() {
            Sums copy = new Sums(sums.length);
            copy.add(sums);
            return copy;
        }
    }

    private final String name;
    private final Measure<T> measure;
    private final Sums sums;
    private transient ListState<double[]> state;

    /** The result of the job has `length` sums under `name`. */
    public Totals(String name, int length, Measure<T> measure) {
        this.name = name;
        this.measure = measure;
        this.sums = new Sums(length);
    }

    @Override
    public void open(OpenContext context) {
        getRuntimeContext().addAccumulator(name, sums);
    }

    @Override
    public void flatMap(T row, Collector<Long> out) {
        measure.add(row, sums.sums);
    }

    @Override
    public void snapshotState(FunctionSnapshotContext context) throws Exception {
        state.update(java.util.List.of(sums.sums.clone()));
    }

    @Override
    public void initializeState(FunctionInitializationContext context) throws Exception {
        state = context.getOperatorStateStore()
                .getListState(new ListStateDescriptor<>(
                        "sums", PrimitiveArrayTypeInfo.DOUBLE_PRIMITIVE_ARRAY_TYPE_INFO));
        for (double[] part : state.get()) {
            sums.add(part);
        }
    }
}
