package midstream.peers;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.co.KeyedCoProcessFunction;
import org.apache.flink.util.Collector;

/** What NEXMark's queries keep by key. */
final class NexmarkJoins {
    private NexmarkJoins() {}

    /** A POJO: a person of q3. */
    public static final class Seller {
        public long id;
        public String name;
        public String city;
        public String state;

        public Seller() {}

        Seller(long id, String name, String city, String state) {
            this.id = id;
            this.name = name;
            this.city = city;
            this.state = state;
        }
    }

    /** q3: both sides are kept for good; auctions only until their seller is known, for there is one of him. */
    static final class Incremental extends KeyedCoProcessFunction<
            Long, Seller, Tuple2<Long, Long>, Tuple4<String, String, String, Long>> {
        static final TypeInformation<Tuple4<String, String, String, Long>> TYPE =
                Types.TUPLE(Types.STRING, Types.STRING, Types.STRING, Types.LONG);
        private transient ValueState<Seller> seller;
        private transient ListState<Long> waiting;

        @Override
        public void open(OpenContext context) {
            seller = getRuntimeContext().getState(new ValueStateDescriptor<>("seller", Types.POJO(Seller.class)));
            waiting = getRuntimeContext().getListState(new ListStateDescriptor<>("waiting", Types.LONG));
        }

        @Override
        public void processElement1(Seller one, Context context, Collector<Tuple4<String, String, String, Long>> out)
                throws Exception {
            seller.update(one);
            for (long auction : waiting.get()) {
                out.collect(Tuple4.of(one.name, one.city, one.state, auction));
            }
            waiting.clear();
        }

        @Override
        public void processElement2(
                Tuple2<Long, Long> auction, Context context, Collector<Tuple4<String, String, String, Long>> out)
                throws Exception {
            Seller one = seller.value();
            if (one == null) {
                waiting.add(auction.f1);
            } else {
                out.collect(Tuple4.of(one.name, one.city, one.state, auction.f1));
            }
        }
    }

    /**
     * q4: category and highest price of an auction that had a bid, once event time has passed its end. A bid before
     * its auction waits for it until event time reaches the bid: no auction then means that it has ended.
     */
    static final class FinalPrice extends KeyedCoProcessFunction<
            Long, Tuple3<Long, Long, Integer>, Tuple2<Long, Long>, Tuple2<Integer, Long>> {
        static final TypeInformation<Tuple2<Integer, Long>> TYPE = Types.TUPLE(Types.INT, Types.LONG);
        /** Expires, category. */
        private transient ValueState<Tuple2<Long, Integer>> auction;

        private transient ValueState<Long> best;
        /** Time, price. */
        private transient ListState<Tuple2<Long, Long>> early;

        @Override
        public void open(OpenContext context) {
            auction = getRuntimeContext()
                    .getState(new ValueStateDescriptor<>("auction", Types.TUPLE(Types.LONG, Types.INT)));
            best = getRuntimeContext().getState(new ValueStateDescriptor<>("best", Types.LONG));
            early = getRuntimeContext()
                    .getListState(new ListStateDescriptor<>("early", Types.TUPLE(Types.LONG, Types.LONG)));
        }

        @Override
        public void processElement1(
                Tuple3<Long, Long, Integer> one, Context context, Collector<Tuple2<Integer, Long>> out)
                throws Exception {
            auction.update(Tuple2.of(one.f1, one.f2));
            context.timerService().registerEventTimeTimer(one.f1);
            for (Tuple2<Long, Long> bid : early.get()) {
                if (bid.f0 >= context.timestamp() && bid.f0 <= one.f1) {
                    raise(bid.f1);
                }
            }
            early.clear();
        }

        @Override
        public void processElement2(Tuple2<Long, Long> bid, Context context, Collector<Tuple2<Integer, Long>> out)
                throws Exception {
            long timeMs = context.timestamp();
            Tuple2<Long, Integer> known = auction.value();
            if (known != null) {
                if (timeMs <= known.f0) {
                    raise(bid.f1);
                }
            } else if (timeMs > context.timerService().currentWatermark()) {
                if (!early.get().iterator().hasNext()) {
                    context.timerService().registerEventTimeTimer(timeMs);
                }
                early.add(Tuple2.of(timeMs, bid.f1));
            }
        }

        private void raise(long price) throws Exception {
            Long found = best.value();
            if (found == null || price > found) {
                best.update(price);
            }
        }

        @Override
        public void onTimer(long timeMs, OnTimerContext context, Collector<Tuple2<Integer, Long>> out)
                throws Exception {
            Tuple2<Long, Integer> known = auction.value();
            if (known != null) {
                if (timeMs >= known.f0) {
                    if (best.value() != null) {
                        out.collect(Tuple2.of(known.f1, best.value()));
                    }
                    auction.clear();
                    best.clear();
                }
                return;
            }
            List<Tuple2<Long, Long>> later = new ArrayList<>();
            long nextMs = Long.MAX_VALUE;
            for (Tuple2<Long, Long> bid : early.get()) {
                if (bid.f0 > timeMs) {
                    later.add(bid);
                    nextMs = Math.min(nextMs, bid.f0);
                }
            }
            early.update(later);
            if (!later.isEmpty()) {
                context.timerService().registerEventTimeTimer(nextMs);
            }
        }
    }

    /** q4: category, average of its final prices so far, and the one that came last. */
    static final class RunningAverage extends RichMapFunction<Tuple2<Integer, Long>, Tuple3<Integer, Double, Long>> {
        static final TypeInformation<Tuple3<Integer, Double, Long>> TYPE =
                Types.TUPLE(Types.INT, Types.DOUBLE, Types.LONG);
        private transient ValueState<Tuple2<Long, Long>> countAndSum;

        @Override
        public void open(OpenContext context) {
            countAndSum = getRuntimeContext()
                    .getState(new ValueStateDescriptor<>("countAndSum", Types.TUPLE(Types.LONG, Types.LONG)));
        }

        @Override
        public Tuple3<Integer, Double, Long> map(Tuple2<Integer, Long> one) throws Exception {
            Tuple2<Long, Long> found = countAndSum.value();
            Tuple2<Long, Long> now = found == null ? Tuple2.of(1L, one.f1) : Tuple2.of(found.f0 + 1, found.f1 + one.f1);
            countAndSum.update(now);
            return Tuple3.of(one.f0, (double) now.f1 / now.f0, one.f1);
        }
    }

    /** q5, q7: of what comes for a window, all that have the greatest number, once the window has ended. */
    static final class BestOfWindow
            extends KeyedProcessFunction<Long, Tuple3<Long, Long, long[]>, Tuple3<Long, Long, long[]>> {
        private transient ValueState<Tuple2<Long, long[]>> best;

        @Override
        public void open(OpenContext context) {
            best = getRuntimeContext().getState(new ValueStateDescriptor<>("best",
                    Types.TUPLE(Types.LONG, PrimitiveArrayTypeInfo.LONG_PRIMITIVE_ARRAY_TYPE_INFO)));
        }

        @Override
        public void processElement(
                Tuple3<Long, Long, long[]> one, Context context, Collector<Tuple3<Long, Long, long[]>> out)
                throws Exception {
            Tuple2<Long, long[]> found = best.value();
            if (found == null) {
                context.timerService().registerEventTimeTimer(one.f0 - 1);
            }
            if (found == null || one.f1 > found.f0) {
                best.update(Tuple2.of(one.f1, one.f2));
            } else if (one.f1.equals(found.f0)) {
                long[] all = Arrays.copyOf(found.f1, found.f1.length + one.f2.length);
                System.arraycopy(one.f2, 0, all, found.f1.length, one.f2.length);
                best.update(Tuple2.of(found.f0, all));
            }
        }

        @Override
        public void onTimer(long timeMs, OnTimerContext context, Collector<Tuple3<Long, Long, long[]>> out)
                throws Exception {
            Tuple2<Long, long[]> found = best.value();
            out.collect(Tuple3.of(timeMs + 1, found.f0, found.f1));
            best.clear();
        }
    }
}
