package midstream.peers;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** What the queries must come to, in plain loops over the events in order, with nothing of Flink. */
final class NexmarkReference {
    private static final int WINDOW_MS = 10_000;
    private static final int SLIDE_MS = 2_000;
    private static final int PANES = WINDOW_MS / SLIDE_MS;

    private NexmarkReference() {}

    /** The sums of the query's sink, of events 0 .. events - 1. */
    static double[] of(String query, long events) {
        return switch (query) {
            case "q0", "q1", "q2" -> bids(query, events);
            case "q3" -> q3(events);
            case "q4" -> q4(events);
            case "q5" -> q5(events);
            case "q7" -> q7(events);
            case "q8" -> q8(events);
            default -> throw new IllegalArgumentException("there is no query " + query);
        };
    }

    private static double[] bids(String query, long events) {
        double[] sums = new double[5];
        for (long n = 0; n < events; n++) {
            if (NexmarkEvents.kind(n) != NexmarkEvents.BID) {
                continue;
            }
            long auction = NexmarkEvents.bidAuction(n);
            long price = NexmarkEvents.price(n);
            if (query.equals("q2")) {
                if (auction % 123 == 0) {
                    add(sums, 1, auction, price);
                }
            } else {
                double paid = query.equals("q1") ? price * 0.908 : price;
                add(sums, 1, auction, NexmarkEvents.bidder(n), paid, NexmarkEvents.timeMs(n));
            }
        }
        return sums;
    }

    private static void add(double[] sums, double... row) {
        for (int i = 0; i < row.length; i++) {
            sums[i] += row[i];
        }
    }

    private static double[] q3(long events) {
        double[] sums = new double[2];
        for (long n = 0; n < events; n++) {
            if (NexmarkEvents.kind(n) == NexmarkEvents.AUCTION && NexmarkEvents.category(n) == 10) {
                long number = NexmarkEvents.seller(n) - NexmarkEvents.FIRST_ID;
                if (Set.of("OR", "ID", "CA").contains(NexmarkEvents.state(number * NexmarkEvents.EPOCH))) {
                    add(sums, 1, NexmarkEvents.FIRST_ID + NexmarkEvents.lastAuction(n));
                }
            }
        }
        return sums;
    }

    private static long eventOfAuction(long number) {
        return number / NexmarkEvents.AUCTIONS_PER_EPOCH * NexmarkEvents.EPOCH
                + number % NexmarkEvents.AUCTIONS_PER_EPOCH + 1;
    }

    /** Of each of five categories how many auctions and the sum of their final prices. */
    private static double[] q4(long events) {
        long[] best = new long[(int) (events / NexmarkEvents.EPOCH + 1) * NexmarkEvents.AUCTIONS_PER_EPOCH];
        for (long n = 0; n < events; n++) {
            if (NexmarkEvents.kind(n) == NexmarkEvents.BID) {
                int number = (int) (NexmarkEvents.bidAuction(n) - NexmarkEvents.FIRST_ID);
                if (NexmarkEvents.timeMs(n) <= NexmarkEvents.expiresMs(eventOfAuction(number))) {
                    best[number] = Math.max(best[number], NexmarkEvents.price(n));
                }
            }
        }
        double[] sums = new double[10];
        for (int number = 0; number < best.length; number++) {
            if (best[number] > 0) {
                int at = 2 * (NexmarkEvents.category(eventOfAuction(number)) - 10);
                sums[at] += 1;
                sums[at + 1] += best[number];
            }
        }
        return sums;
    }

    private static double[] q5(long events) {
        List<Map<Long, Integer>> panes = new ArrayList<>();
        for (long n = 0; n < events; n++) {
            int pane = (int) (NexmarkEvents.timeMs(n) / SLIDE_MS);
            while (panes.size() <= pane) {
                panes.add(new HashMap<>());
            }
            if (NexmarkEvents.kind(n) == NexmarkEvents.BID) {
                panes.get(pane).merge(NexmarkEvents.bidAuction(n), 1, Integer::sum);
            }
        }
        double[] sums = new double[3];
        for (int first = 1 - PANES; first < panes.size(); first++) {
            Map<Long, Integer> counts = new HashMap<>();
            for (int pane = Math.max(first, 0); pane < Math.min(first + PANES, panes.size()); pane++) {
                panes.get(pane).forEach((auction, count) -> counts.merge(auction, count, Integer::sum));
            }
            int most = counts.values().stream().max(Integer::compare).orElse(0);
            counts.forEach((auction, count) -> {
                if (count == most) {
                    add(sums, 1, count, auction);
                }
            });
        }
        return sums;
    }

    private static double[] q7(long events) {
        double[] sums = new double[3];
        double[] window = new double[3];
        long best = 0;
        long at = 0;
        for (long n = 0; n < events; n++) {
            if (NexmarkEvents.timeMs(n) / WINDOW_MS != at) {
                add(sums, window);
                window = new double[3];
                best = 0;
                at = NexmarkEvents.timeMs(n) / WINDOW_MS;
            }
            if (NexmarkEvents.kind(n) == NexmarkEvents.BID && NexmarkEvents.price(n) >= best) {
                if (NexmarkEvents.price(n) > best) {
                    best = NexmarkEvents.price(n);
                    window = new double[3];
                }
                add(window, 1, best, NexmarkEvents.bidAuction(n));
            }
        }
        add(sums, window);
        return sums;
    }

    private static double[] q8(long events) {
        double[] sums = new double[2];
        Set<Long> seen = new HashSet<>();
        for (long n = 0; n < events; n++) {
            if (NexmarkEvents.kind(n) == NexmarkEvents.AUCTION) {
                long seller = NexmarkEvents.seller(n);
                long createdMs =
                        NexmarkEvents.timeMs((seller - NexmarkEvents.FIRST_ID) * NexmarkEvents.EPOCH);
                if (createdMs / WINDOW_MS == NexmarkEvents.timeMs(n) / WINDOW_MS && seen.add(seller)) {
                    add(sums, 1, seller);
                }
            }
        }
        return sums;
    }
}
