package midstream.peers;

import com.sun.management.GarbageCollectionNotificationInfo;
import com.sun.management.GarbageCollectorMXBean;
import java.lang.management.ManagementFactory;
import java.lang.management.MemoryUsage;
import javax.management.ListenerNotFoundException;
import javax.management.NotificationEmitter;
import javax.management.NotificationListener;
import javax.management.openmbean.CompositeData;

/** The most heap that was in use right after a collection: nearer to what is alive than the process's size is. */
final class HeapAfterGc implements AutoCloseable {
    private volatile long peakBytes;
    private final NotificationListener listener = (notification, handback) -> {
        if (notification.getType().equals(GarbageCollectionNotificationInfo.GARBAGE_COLLECTION_NOTIFICATION)) {
            long used = GarbageCollectionNotificationInfo.from((CompositeData) notification.getUserData())
                    .getGcInfo().getMemoryUsageAfterGc().entrySet().stream()
                    .filter(pool -> isHeap(pool.getKey()))
                    .map(java.util.Map.Entry::getValue)
                    .mapToLong(MemoryUsage::getUsed)
                    .sum();
            peakBytes = Math.max(peakBytes, used);
        }
    };

    HeapAfterGc() {
        collectors().forEach(one -> ((NotificationEmitter) one).addNotificationListener(listener, null, null));
    }

    private static boolean isHeap(String pool) {
        return pool.contains("Eden") || pool.contains("Survivor") || pool.contains("Old");
    }

    private static java.util.List<GarbageCollectorMXBean> collectors() {
        return ManagementFactory.getPlatformMXBeans(GarbageCollectorMXBean.class);
    }

    void reset() {
        System.gc();
        peakBytes = 0;
    }

    long peakMb() {
        return peakBytes / 1_000_000;
    }

    @Override
    public void close() throws ListenerNotFoundException {
        for (GarbageCollectorMXBean one : collectors()) {
            ((NotificationEmitter) one).removeNotificationListener(listener);
        }
    }
}
