package midstream.peers;

/** The generator of NEXMark events in closed form: event n is a function of n alone. */
final class NexmarkEvents implements IndexSource.Generator<NexmarkEvents.Event> {
    static final int EPOCH = 50;
    private static final int AUCTIONS_PER_EPOCH = 3;
    private static final int FIRST_ID = 1000;
    static final int PERSON = 0;
    static final int AUCTION = 1;
    static final int BID = 2;
    private static final int EVENTS_PER_MS = 10;
    private static final int LIFE_MS = 2 * 167;

    private static final String[] FIRST = {
        "Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"
    };
    private static final String[] LAST = {
        "Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"
    };
    private static final String[] CITY = {
        "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"
    };
    private static final String[] STATE = {"AZ", "CA", "ID", "OR", "WA", "WY"};
    private static final int PRICES = 4096;
    private static final long[] PRICE = new long[PRICES];

    static {
        for (int i = 0; i < PRICES; i++) {
            PRICE[i] = 100 * (long) Math.floor(Math.pow(10, i / (double) PRICES * 6) + 1e-9);
        }
    }

    private static final String[] HOT_CHANNEL = {"Google", "Facebook", "Baidu", "Apple"};
    private static final int OTHER_CHANNELS = 10_000;
    private static final int DIRECTORY_LETTERS = 5;
    private static final String[] CHANNEL = new String[HOT_CHANNEL.length + OTHER_CHANNELS];
    private static final String[] URL = new String[CHANNEL.length];
    private static final String[] EXTRA = new String[4096];

    static {
        long letter = 0;
        for (int i = 0; i < CHANNEL.length; i++) {
            int other = i - HOT_CHANNEL.length;
            CHANNEL[i] = other < 0 ? HOT_CHANNEL[i] : "channel-" + other;
            StringBuilder url = new StringBuilder("https://www.nexmark.com/");
            for (int directory = 0; directory < 3; directory++) {
                url.append(letters(14, letter, DIRECTORY_LETTERS)).append('/');
                letter += DIRECTORY_LETTERS;
            }
            url.append("item.htm?query=1");
            URL[i] = other >= 0 && other % 10 > 0 ? url.append("&channel_id=").append(other).toString() : url.toString();
        }
        letter = 0;
        for (int i = 0; i < EXTRA.length; i++) {
            EXTRA[i] = letters(15, letter, 54 + i % 28);
            letter += EXTRA[i].length();
        }
    }

    private static String letters(int salt, long first, int count) {
        StringBuilder letters = new StringBuilder(count);
        for (long i = first; i < first + count; i++) {
            letters.append((char) ('a' + draw(i, salt, 26)));
        }
        return letters.toString();
    }

    private final int splits;

    NexmarkEvents(int splits) {
        this.splits = splits;
    }

    /** Split s has the epochs that leave s when divided by how many splits there are. */
    private long number(int split, long j) {
        return (j / EPOCH * splits + split) * EPOCH + j % EPOCH;
    }

    @Override
    public long timestampMs(int split, long j) {
        return timeMs(number(split, j));
    }

    @Override
    public Event make(int split, long j) {
        long n = number(split, j);
        Event event = new Event();
        event.kind = kind(n);
        event.n = n;
        event.timeMs = timeMs(n);
        return event;
    }

    private static long mix(long x) {
        long z = x + 0x9E3779B97F4A7C15L;
        z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9L;
        z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
        return z ^ z >>> 31;
    }

    private static long draw(long n, int salt, long k) {
        return (mix(n * 16 + salt) >>> 33) % k;
    }

    private static int kind(long n) {
        long off = n % EPOCH;
        return off == 0 ? PERSON : off <= AUCTIONS_PER_EPOCH ? AUCTION : BID;
    }

    private static long timeMs(long n) {
        return n / EVENTS_PER_MS;
    }

    private static long lastPerson(long n) {
        return n / EPOCH;
    }

    private static long lastAuction(long n) {
        return n / EPOCH * AUCTIONS_PER_EPOCH + Math.min(n % EPOCH, AUCTIONS_PER_EPOCH) - 1;
    }

    /** Never serialised: queries take what they read of it, and nothing else, in the source's chain. A POJO. */
    public static class Event {
        public int kind;
        public long n;
        public long timeMs;
        private transient int number = -1;

        String name() {
            return FIRST[(int) draw(n, 0, FIRST.length)] + " " + LAST[(int) draw(n, 1, LAST.length)];
        }

        String state() {
            return STATE[(int) draw(n, 3, STATE.length)];
        }

        String city() {
            return CITY[(int) draw(n, 2, CITY.length)];
        }

        long person() {
            return FIRST_ID + lastPerson(n);
        }

        long auction() {
            return FIRST_ID + lastAuction(n);
        }

        long seller() {
            long last = lastPerson(n);
            return FIRST_ID + (draw(n, 0, 4) > 0 ? last / 100 * 100 : last - draw(n, 1, Math.min(last, 999) + 1));
        }

        int category() {
            return 10 + (int) draw(n, 2, 5);
        }

        long expiresMs() {
            return timeMs(n) + 1 + draw(n, 4, LIFE_MS);
        }

        long bidAuction() {
            long last = lastAuction(n);
            return FIRST_ID + (draw(n, 0, 2) > 0 ? last / 100 * 100 : last - draw(n, 1, Math.min(last, 99) + 1));
        }

        long bidder() {
            long last = lastPerson(n);
            long hot = Math.min(last / 100 * 100 + 1, last);
            return FIRST_ID + (draw(n, 2, 4) > 0 ? hot : last - draw(n, 3, Math.min(last, 999) + 1));
        }

        long price() {
            return PRICE[(int) draw(n, 4, PRICES)];
        }

        /** What `channel` and `url` are of; drawn once. */
        private int channelNumber() {
            if (number < 0) {
                number = (int) (draw(n, 5, 2) > 0
                        ? draw(n, 6, HOT_CHANNEL.length)
                        : HOT_CHANNEL.length + draw(n, 7, OTHER_CHANNELS));
            }
            return number;
        }

        String channel() {
            return CHANNEL[channelNumber()];
        }

        String url() {
            return URL[channelNumber()];
        }

        String extra() {
            return EXTRA[(int) draw(n, 8, EXTRA.length)];
        }

        String item() {
            return "item-" + lastAuction(n);
        }

        long initialBid() {
            return 100 + draw(n, 3, 1_000_000);
        }

        long reserve() {
            return initialBid() + draw(n, 5, 1_000_000);
        }
    }
}
