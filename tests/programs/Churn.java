import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.zip.CRC32;
import java.util.zip.Deflater;
import java.util.zip.Inflater;

/** What a Java program has of malloc's: buffers outside of its heap, zlib's state, threads, loaded classes. */
public class Churn {
    static long buffers(int seed) {
        ArrayDeque<ByteBuffer> held = new ArrayDeque<>();
        CRC32 crc = new CRC32();
        for (int i = 0; i < 1500; i++) {
            ByteBuffer buffer = ByteBuffer.allocateDirect(1 + (i * 7919 + seed) % 60000);
            for (int at = 0; at < buffer.capacity(); at += 512) {
                buffer.put(at, (byte) (i + at + seed));
            }
            held.add(buffer);
            if (held.size() > 200) {
                ByteBuffer old = held.remove();
                byte[] head = new byte[Math.min(1024, old.capacity())];
                old.get(0, head);
                crc.update(head);
            }
        }
        return crc.getValue();
    }

    static long deflate(int seed) throws Exception {
        CRC32 crc = new CRC32();
        for (int i = 0; i < 120; i++) {
            byte[] data = new byte[20000 + i * 50];
            for (int at = 0; at < data.length; at++) {
                data[at] = (byte) ((at * (i + seed)) >> 7);
            }
            Deflater deflater = new Deflater(i % 10);
            deflater.setInput(data);
            deflater.finish();
            byte[] packed = new byte[data.length * 2 + 100];
            int length = deflater.deflate(packed);
            deflater.end();
            Inflater inflater = new Inflater();
            inflater.setInput(packed, 0, length);
            byte[] back = new byte[data.length];
            if (inflater.inflate(back) != data.length || !java.util.Arrays.equals(back, data)) {
                throw new IllegalStateException("what was packed did not come back");
            }
            inflater.end();
            crc.update(packed, 0, length);
        }
        return crc.getValue();
    }

    static long all(ExecutorService pool, int count, Callable<Long>[] tasks) throws Exception {
        long sum = 0;
        ArrayDeque<Future<Long>> results = new ArrayDeque<>();
        for (int i = 0; i < count; i++) {
            results.add(pool.submit(tasks[i % tasks.length]));
        }
        for (Future<Long> result : results) {
            sum = sum * 31 + result.get();
        }
        return sum;
    }

    @SuppressWarnings("unchecked")
    public static void main(String[] arguments) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(4);
        System.out.println("buffers " + all(pool, 8, new Callable[] {() -> buffers(1), () -> buffers(2)}));
        System.out.println("deflate " + all(pool, 8, new Callable[] {() -> deflate(3), () -> deflate(4)}));
        pool.shutdown();
        long sum = 0;
        for (int i = 0; i < 300; i++) {
            long[] found = new long[1];
            int number = i;
            Thread thread = new Thread(() -> found[0] = number * 17L % 101);
            thread.start();
            thread.join();
            sum += found[0];
        }
        System.out.println("threads " + sum);
    }
}
