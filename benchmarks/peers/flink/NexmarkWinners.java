package midstream.peers;

import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.streaming.api.functions.co.KeyedCoProcessFunction;
import org.apache.flink.util.Collector;

/** q9: auctions with the bid that has won. q20: bids with their auction. */
final class NexmarkWinners {
    private NexmarkWinners() {}

    /** A POJO. */
    public static final class Auction {
        public long id;
        public String item;
        public long initialBid;
        public long reserve;
        public long timeMs;
        public long expiresMs;
        public long seller;
        public int category;

        static Auction of(NexmarkEvents.Event event) {
            Auction one = new Auction();
            one.id = event.auction();
            one.item = event.item();
            one.initialBid = event.initialBid();
            one.reserve = event.reserve();
            one.timeMs = event.timeMs;
            one.expiresMs = event.expiresMs();
            one.seller = event.seller();
            one.category = event.category();
            return one;
        }
    }

    /** A POJO. */
    public static final class Bid {
        public long auction;
        public long bidder;
        public long price;
        public long timeMs;
        public String extra;

        static Bid of(NexmarkEvents.Event event) {
            Bid one = new Bid();
            one.auction = event.bidAuction();
            one.bidder = event.bidder();
            one.price = event.price();
            one.timeMs = event.timeMs;
            one.extra = event.extra();
            return one;
        }

        /** The highest, of these the earliest, of these the smallest number of a bidder, of these the first text. */
        boolean isBetterThan(Bid other) {
            if (price != other.price) {
                return price > other.price;
            }
            if (timeMs != other.timeMs) {
                return timeMs < other.timeMs;
            }
            return bidder != other.bidder ? bidder < other.bidder : extra.compareTo(other.extra) < 0;
        }
    }

    /**
     * An auction that had a bid, and the best of these, once event time has passed its end. As in q4, a bid before its
     * auction waits for it until event time reaches the bid.
     */
    static final class WinningBid extends KeyedCoProcessFunction<Long, Auction, Bid, Tuple2<Auction, Bid>> {
        static final TypeInformation<Tuple2<Auction, Bid>> TYPE =
                Types.TUPLE(Types.POJO(Auction.class), Types.POJO(Bid.class));
        private transient ValueState<Auction> auction;
        private transient ValueState<Bid> best;
        private transient ListState<Bid> early;

        @Override
        public void open(OpenContext context) {
            auction = getRuntimeContext().getState(new ValueStateDescriptor<>("auction", Types.POJO(Auction.class)));
            best = getRuntimeContext().getState(new ValueStateDescriptor<>("best", Types.POJO(Bid.class)));
            early = getRuntimeContext().getListState(new ListStateDescriptor<>("early", Types.POJO(Bid.class)));
        }

        @Override
        public void processElement1(Auction one, Context context, Collector<Tuple2<Auction, Bid>> out)
                throws Exception {
            auction.update(one);
            context.timerService().registerEventTimeTimer(one.expiresMs);
            for (Bid bid : early.get()) {
                offer(one, bid);
            }
            early.clear();
        }

        @Override
        public void processElement2(Bid bid, Context context, Collector<Tuple2<Auction, Bid>> out) throws Exception {
            Auction known = auction.value();
            if (known != null) {
                offer(known, bid);
            } else if (bid.timeMs > context.timerService().currentWatermark()) {
                if (!early.get().iterator().hasNext()) {
                    context.timerService().registerEventTimeTimer(bid.timeMs);
                }
                early.add(bid);
            }
        }

        private void offer(Auction known, Bid bid) throws Exception {
            if (bid.timeMs < known.timeMs || bid.timeMs > known.expiresMs) {
                return;
            }
            Bid found = best.value();
            if (found == null || bid.isBetterThan(found)) {
                best.update(bid);
            }
        }

        @Override
        public void onTimer(long timeMs, OnTimerContext context, Collector<Tuple2<Auction, Bid>> out)
                throws Exception {
            Auction known = auction.value();
            if (known != null) {
                if (timeMs >= known.expiresMs) {
                    if (best.value() != null) {
                        out.collect(Tuple2.of(known, best.value()));
                    }
                    auction.clear();
                    best.clear();
                }
                return;
            }
            List<Bid> later = new ArrayList<>();
            long nextMs = Long.MAX_VALUE;
            for (Bid bid : early.get()) {
                if (bid.timeMs > timeMs) {
                    later.add(bid);
                    nextMs = Math.min(nextMs, bid.timeMs);
                }
            }
            early.update(later);
            if (!later.isEmpty()) {
                context.timerService().registerEventTimeTimer(nextMs);
            }
        }
    }

    /** A POJO: a bid of q18 and q20. */
    public static final class WholeBid {
        public long auction;
        public long bidder;
        public long price;
        public long timeMs;
        public String channel;
        public String url;
        public String extra;

        static WholeBid of(NexmarkEvents.Event event) {
            WholeBid one = new WholeBid();
            one.auction = event.bidAuction();
            one.bidder = event.bidder();
            one.price = event.price();
            one.timeMs = event.timeMs;
            one.channel = event.channel();
            one.url = event.url();
            one.extra = event.extra();
            return one;
        }
    }

    /** Auctions are kept for good; bids until their auction is known, or event time has reached them. */
    static final class WithAuction extends KeyedCoProcessFunction<Long, Auction, WholeBid, Tuple2<WholeBid, Auction>> {
        static final TypeInformation<Tuple2<WholeBid, Auction>> TYPE =
                Types.TUPLE(Types.POJO(WholeBid.class), Types.POJO(Auction.class));
        private transient ValueState<Auction> auction;
        private transient ListState<WholeBid> waiting;

        @Override
        public void open(OpenContext context) {
            auction = getRuntimeContext().getState(new ValueStateDescriptor<>("auction", Types.POJO(Auction.class)));
            waiting = getRuntimeContext()
                    .getListState(new ListStateDescriptor<>("waiting", Types.POJO(WholeBid.class)));
        }

        @Override
        public void processElement1(Auction one, Context context, Collector<Tuple2<WholeBid, Auction>> out)
                throws Exception {
            auction.update(one);
            for (WholeBid bid : waiting.get()) {
                out.collect(Tuple2.of(bid, one));
            }
            waiting.clear();
        }

        @Override
        public void processElement2(WholeBid bid, Context context, Collector<Tuple2<WholeBid, Auction>> out)
                throws Exception {
            Auction known = auction.value();
            if (known != null) {
                out.collect(Tuple2.of(bid, known));
            } else if (bid.timeMs > context.timerService().currentWatermark()) {
                context.timerService().registerEventTimeTimer(bid.timeMs);
                waiting.add(bid);
            }
        }

        @Override
        public void onTimer(long timeMs, OnTimerContext context, Collector<Tuple2<WholeBid, Auction>> out)
                throws Exception {
            List<WholeBid> later = new ArrayList<>();
            for (WholeBid bid : waiting.get()) {
                if (bid.timeMs > timeMs) {
                    later.add(bid);
                }
            }
            waiting.update(later);
        }
    }
}
